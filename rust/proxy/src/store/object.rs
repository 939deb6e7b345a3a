//! The file of one object: a header of fixed length and the rows behind it, row-major, little-endian, on tmpfs.
//!
//! Router and plug-in write the same format, so that a client maps either. Numbers are little-endian; rows begin 64-byte aligned.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | magic `R3STORE1` |
//! | 8..12 | version, 1 |
//! | 12..16 | state: 0 being written, 1 complete |
//! | 16..20 | dtype by its size: 1 uint8, 2 uint16, 4 int32 |
//! | 20..24, 24..28 | layers, top_k |
//! | 28..32 | position of the first row in the sequence |
//! | 32..40 | rows |
//! | 40..44 | CRC-32 (IEEE) of the row bytes |
//! | 44..48 | attempt |
//! | 48..56, 56..64 | created, expires (0: never): unix time, milliseconds |
//! | 64..160 | weight version: u16 length, then at most 94 bytes of UTF-8 |
//! | 160..256 | rid, likewise |
use r3router_core::r3::Dtype;

/// Bytes before the first row.
pub const HEADER: usize = 256;
const MAGIC: &[u8; 8] = b"R3STORE1";
/// Most bytes of a text.
const TEXT: usize = 94;

/// What an object's header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// How a number is stored.
    pub dtype: Dtype,
    /// Layers of a row.
    pub layers: u32,
    /// Experts of a layer.
    pub top_k: u32,
    /// Position of the first row in the sequence.
    pub start: u32,
    /// Rows.
    pub rows: u64,
    /// Tells attempts of one sample apart.
    pub attempt: u32,
    /// The weights that the rows were routed by, "" when the engine does not say.
    pub weight_version: String,
    /// The id of the attempt on the engines.
    pub rid: String,
}

impl Meta {
    /// Bytes of a row.
    pub fn row(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.top_k) * self.dtype.size() as u64
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.row() * self.rows
    }

    /// The header. Times are unix milliseconds.
    pub fn header(&self, crc32: u32, created_ms: u64, expires_ms: u64) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = out.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, MAGIC);
        let numbers = [1, 1, self.dtype.size() as u32, self.layers, self.top_k, self.start];
        for (i, n) in numbers.into_iter().enumerate() {
            put(8 + 4 * i, &n.to_le_bytes());
        }
        put(32, &self.rows.to_le_bytes());
        put(40, &crc32.to_le_bytes());
        put(44, &self.attempt.to_le_bytes());
        put(48, &created_ms.to_le_bytes());
        put(56, &expires_ms.to_le_bytes());
        for (at, text) in [(64, &self.weight_version), (160, &self.rid)] {
            let mut len = text.len().min(TEXT);
            while !text.is_char_boundary(len) {
                len -= 1;
            }
            put(at, &(len as u16).to_le_bytes());
            put(at + 2, text.as_bytes().get(..len).unwrap_or_default());
        }
        out
    }

    /// What the header of a complete object says: itself, its CRC-32, and when it expires, unix milliseconds.
    pub fn read(header: &[u8; HEADER]) -> Option<(Self, u32, u64)> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let text_at = |at: usize| {
            let len = usize::from(u16::from_le_bytes(*header.get(at..)?.first_chunk()?));
            let bytes = header.get(at + 2..at + 2 + len.min(TEXT))?;
            Some(String::from_utf8_lossy(bytes).into_owned())
        };
        if !header.starts_with(MAGIC) || (u32_at(8)?, u32_at(12)?) != (1, 1) {
            return None;
        }
        let dtype = [Dtype::U8, Dtype::U16, Dtype::I32].into_iter().find(|d| u32_at(16) == Some(d.size() as u32))?;
        let meta = Self {
            dtype,
            layers: u32_at(20)?,
            top_k: u32_at(24)?,
            start: u32_at(28)?,
            rows: u64_at(32)?,
            attempt: u32_at(44)?,
            weight_version: text_at(64)?,
            rid: text_at(160)?,
        };
        // Bytes of the rows that cannot be counted are no rows.
        u64::from(meta.layers)
            .checked_mul(u64::from(meta.top_k))
            .and_then(|n| n.checked_mul(dtype.size() as u64)?.checked_mul(meta.rows))?;
        let expires = u64_at(56)?;
        Some((meta, u32_at(40)?, if expires == 0 { u64::MAX } else { expires }))
    }
}

#[cfg(test)]
mod tests {
    use super::{HEADER, Meta};
    use r3router_core::r3::Dtype;

    #[test]
    fn the_header_has_every_field_at_its_place() {
        let meta = Meta {
            dtype: Dtype::U16,
            layers: 48,
            top_k: 8,
            start: 3,
            rows: 1 << 33,
            attempt: 7,
            weight_version: "v-12".to_owned(),
            rid: "é".repeat(60),
        };
        let h = meta.header(0xdead_beef, 10, 20);
        assert_eq!(&h[..16], b"R3STORE1\x01\0\0\0\x01\0\0\0");
        let u32_at = |at: usize| u32::from_le_bytes(h[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(h[at..at + 8].try_into().unwrap());
        assert_eq!([16, 20, 24, 28, 40, 44].map(u32_at), [2, 48, 8, 3, 0xdead_beef, 7]);
        assert_eq!([32, 48, 56].map(u64_at), [1 << 33, 10, 20]);
        assert_eq!(&h[64..70], b"\x04\0v-12");
        assert_eq!(h[160], 94, "cut between characters");
        assert_eq!(std::str::from_utf8(&h[162..256]).unwrap(), "é".repeat(47));
        assert_eq!((h.len(), meta.row(), HEADER % 64), (256, 768, 0));
    }

    #[test]
    fn a_header_is_read_back_and_nothing_else_is_taken_for_one() {
        let meta = Meta {
            dtype: Dtype::I32,
            layers: 3,
            top_k: 2,
            start: 9,
            rows: 77,
            attempt: 2,
            weight_version: "v".to_owned(),
            rid: "r~1".to_owned(),
        };
        let good = meta.header(5, 10, 20);
        assert_eq!(Meta::read(&good), Some((meta.clone(), 5, 20)));
        assert_eq!(Meta::read(&meta.header(5, 10, 0)), Some((meta, 5, u64::MAX)));
        // Magic, version, state, dtype, and more rows than there can be.
        for (at, byte) in [(0, b'X'), (8, 2), (12, 0), (16, 3), (39, 0xff)] {
            let mut bad = good;
            bad[at] = byte;
            assert_eq!(Meta::read(&bad), None, "byte {at}");
        }
    }
}
