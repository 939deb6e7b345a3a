//! R3 payloads (`routed_experts`, `indexer_topk`) in engine replies: found, decoded to narrow rows, checked, merged and encoded
//! in one pass over the bytes, at any chunking.
pub mod decode;
pub mod descriptor;
mod extract;
pub mod narrow;
pub mod outline;
pub mod rows;

pub use extract::{Extract, Name, Piece, Wanted};

/// How the numbers of a payload are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// One byte; up to 256 experts.
    U8,
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian, signed: what engines send unless they say otherwise.
    I32,
}

impl Dtype {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::I32 => 4,
        }
    }

    /// The name that engines and clients use.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::I32 => "int32",
        }
    }

    /// The dtype of that name.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "uint8" => Some(Self::U8),
            "uint16" => Some(Self::U16),
            "int32" => Some(Self::I32),
            _ => None,
        }
    }

    /// The narrowest that holds expert ids `0..experts`.
    pub fn for_experts(experts: u32) -> Self {
        match experts {
            0..=256 => Self::U8,
            257..=65_536 => Self::U16,
            _ => Self::I32,
        }
    }
}
