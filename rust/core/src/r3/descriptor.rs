//! What an engine with r3router's plug-in sends in the place of a payload: the address of rows that stay on its host.
//!
//! On the wire it is the field's normal base64 string. Its bytes are the magic `R3H1`, then compact JSON with exactly the
//! members of [`Descriptor`], in that order:
//!
//! ```json
//! {"uri":"r3://10.0.0.7:9400/a/17","offset":0,"pos":0,"rows":57000,"dtype":"uint8","shape":[57000,40,8],"crc32":305419896}
//! ```
//!
//! A raw payload cannot begin with the magic: as an int32 it would be expert 826,815,314.
use crate::error::Error;

use super::Dtype;

/// The first bytes of a descriptor.
pub const MAGIC: [u8; 4] = *b"R3H1";
/// The most bytes that a descriptor may have, magic included.
pub const MAX_LEN: usize = 4096;

/// Rows of one payload that lie somewhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Where they are served.
    pub uri: String,
    /// First byte of them in what the address names.
    pub offset: u64,
    /// Position of the first row in the sequence (`routed_experts_start_len` as the engine obeyed it).
    pub pos: u32,
    /// Number of rows.
    pub rows: u32,
    /// How the ids are stored.
    pub dtype: Dtype,
    /// Layers of a row.
    pub layers: u32,
    /// Experts of a layer.
    pub top_k: u32,
    /// CRC-32 (IEEE) of the `rows * layers * top_k * dtype` bytes.
    pub crc32: u32,
}

impl Descriptor {
    /// Magic and JSON, not yet in base64.
    pub fn encode(&self) -> Vec<u8> {
        todo!()
    }

    /// The base64 text that takes the payload's place in the reply.
    pub fn encode_base64(&self) -> String {
        base64_simd::STANDARD.encode_to_string(self.encode())
    }

    /// Reads what [`Self::encode`] wrote. Unknown members are ignored.
    ///
    /// # Errors
    /// `R3Mismatch` when the bytes are not a descriptor or its numbers do not fit together.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let _ = bytes;
        todo!()
    }
}
