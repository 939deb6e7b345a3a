//! The rows of one payload, held as narrow as their numbers allow. Each extent has its own width: when a number does not fit, the
//! next extent is wider, and nothing that is held has to move.
use std::sync::Arc;

use r3router_core::error::Error;
use r3router_core::r3::{Dtype, narrow};

use super::arena::{Arena, Memory};

#[derive(Debug)]
struct Extent {
    memory: Memory,
    held: Dtype,
    items: usize,
}

impl Extent {
    fn room(&self) -> usize {
        self.memory.map.len() / self.held.size() - self.items
    }

    fn bytes(&self, from: usize, items: usize) -> &[u8] {
        let size = self.held.size();
        &self.memory.map[from * size..(from + items) * size]
    }
}

/// Numbers in the arena, in order. Int32 from the wire is narrowed; uint8 and uint16 are kept as they are.
#[derive(Debug)]
pub struct Rows {
    arena: Arena,
    wire: Dtype,
    /// The width for new extents; only ever widens.
    width: Dtype,
    extents: Vec<Extent>,
    /// Numbers of the first extent that were given up.
    front: usize,
    items: u64,
    /// Numbers that are expected, 0 when unknown; bounds the first extent.
    hint: usize,
}

impl Rows {
    /// No numbers yet, of width `wire` where they come from. `hint` is about how many will come, 0 when unknown.
    pub fn new(arena: &Arena, wire: Dtype, hint: usize) -> Self {
        let width = if wire == Dtype::I32 { Dtype::U8 } else { wire };
        Self { arena: arena.clone(), wire, width, extents: Vec::new(), front: 0, items: 0, hint }
    }

    /// The width on the wire.
    pub fn wire(&self) -> Dtype {
        self.wire
    }

    /// Numbers held.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// Bytes of the arena that are held.
    pub fn held(&self) -> u64 {
        self.extents.iter().map(|e| e.memory.map.len() as u64).sum()
    }

    /// Appends numbers as they are on the wire; `bytes` are whole numbers.
    ///
    /// # Errors
    /// `R3ArenaTooSmall`.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let size = self.wire.size();
        while bytes.len() >= size {
            let room = match self.extents.last() {
                Some(e) if e.held == self.width && e.room() > 0 => e.room(),
                _ => self.grow()?,
            };
            let take = room.min(bytes.len() / size);
            let Some(e) = self.extents.last_mut() else { return Ok(()) };
            let (from, to) = (e.items * e.held.size(), (e.items + take) * e.held.size());
            let (src, dst) = (&bytes[..take * size], &mut e.memory.map[from..to]);
            if self.wire == Dtype::I32 {
                let all = match e.held {
                    Dtype::U8 => narrow::to_u8(src, dst),
                    Dtype::U16 => narrow::to_u16(src, dst),
                    Dtype::I32 => {
                        dst.copy_from_slice(src);
                        0
                    }
                };
                let needs = narrow::fit(all);
                if needs > e.held {
                    self.width = needs;
                    if e.items == 0 {
                        e.held = needs;
                    }
                    continue;
                }
            } else {
                dst.copy_from_slice(src);
            }
            e.items += take;
            self.items += take as u64;
            bytes = &bytes[take * size..];
        }
        Ok(())
    }

    /// Appends numbers that are narrow already, for a wire of int32.
    ///
    /// # Errors
    /// `R3ArenaTooSmall`.
    pub fn push_narrow(&mut self, dtype: Dtype, mut bytes: &[u8]) -> Result<(), Error> {
        let size = dtype.size();
        self.width = self.width.max(dtype);
        while bytes.len() >= size {
            let room = match self.extents.last() {
                Some(e) if e.held == self.width && e.room() > 0 => e.room(),
                _ => self.grow()?,
            };
            let take = room.min(bytes.len() / size);
            let Some(e) = self.extents.last_mut() else { return Ok(()) };
            let held = e.held.size();
            let dst = &mut e.memory.map[e.items * held..(e.items + take) * held];
            dst[..take * size].copy_from_slice(&bytes[..take * size]);
            narrow::widen(dst, take, dtype, e.held);
            e.items += take;
            self.items += take as u64;
            bytes = &bytes[take * size..];
        }
        Ok(())
    }

    fn grow(&mut self) -> Result<usize, Error> {
        let extent = self.arena.extent();
        let left = self.hint.saturating_sub(usize::try_from(self.items).unwrap_or(usize::MAX)) * self.width.size();
        // What is left of a known length needs no full extent; a length that was short grows by a little each time.
        let more = if left > 0 { left } else { usize::try_from(self.held() / 8).unwrap_or(extent) };
        let bytes = if self.hint == 0 { extent } else { more.clamp(4096, extent) };
        let memory = self.arena.map(bytes)?;
        let e = Extent { memory, held: self.width, items: 0 };
        let room = e.room();
        self.extents.push(e);
        Ok(room)
    }

    /// Gives up the first `items` numbers.
    pub fn discard_front(&mut self, items: u64) {
        let mut drop = items.min(self.items);
        self.items -= drop;
        while let Some(first) = self.extents.first() {
            let here = (first.items - self.front) as u64;
            if drop < here {
                break;
            }
            drop -= here;
            self.front = 0;
            self.extents.remove(0);
        }
        self.front += drop as usize;
    }

    /// The same bytes, read as numbers of `wire` (the reply named its dtype after the payload). `tail` are bytes that were no whole number.
    ///
    /// # Errors
    /// `R3ArenaTooSmall`.
    pub fn reinterpret(&mut self, wire: Dtype, tail: &[u8]) -> Result<Self, Error> {
        let mut out = Self::new(&self.arena, wire, self.hint * self.wire.size() / wire.size());
        let items = self.items;
        let old = std::mem::replace(self, Self::new(&self.arena, self.wire, 0));
        let mut reader = Reader::new(Arc::new(old), 0, items);
        let mut tile = vec![0; 48 << 10];
        let mut carry = 0;
        loop {
            let n = reader.fill(&mut tile[carry..]);
            let have = carry + n;
            let whole = have / wire.size() * wire.size();
            out.push(&tile[..whole])?;
            tile.copy_within(whole..have, 0);
            carry = have - whole;
            if n == 0 {
                break;
            }
        }
        tile[carry..carry + tail.len()].copy_from_slice(tail);
        out.push(&tile[..carry + tail.len()])?;
        Ok(out)
    }
}

/// Reads a range of rows back as they were on the wire.
#[derive(Debug)]
pub struct Reader {
    rows: Arc<Rows>,
    extent: usize,
    at: usize,
    left: u64,
}

impl Reader {
    /// Numbers `[from, from + items)` of `rows`.
    pub fn new(rows: Arc<Rows>, from: u64, items: u64) -> Self {
        let mut reader = Self { at: rows.front, rows, extent: 0, left: 0 };
        reader.left = items.min(reader.rows.items.saturating_sub(from));
        let mut skip = from;
        while let Some(e) = reader.rows.extents.get(reader.extent) {
            let here = (e.items - reader.at) as u64;
            if skip < here {
                break;
            }
            skip -= here;
            reader.extent += 1;
            reader.at = 0;
        }
        reader.at += skip as usize;
        reader
    }

    /// Bytes that are still to come.
    pub fn left(&self) -> u64 {
        self.left * self.rows.wire.size() as u64
    }

    /// As [`Reader::fill`], with every number as `dtype`, whatever the wire's is.
    ///
    /// # Errors
    /// The first number (as its bits) that `dtype` does not hold.
    pub fn fill_as(&mut self, dtype: Dtype, out: &mut [u8]) -> Result<usize, u32> {
        let size = dtype.size();
        let mut done = 0;
        let mut wide = Vec::new();
        while self.left > 0 && out.len() - done >= size {
            let Some(e) = self.rows.extents.get(self.extent) else { break };
            let here = e.items - self.at;
            if here == 0 {
                self.extent += 1;
                self.at = 0;
                continue;
            }
            let take = here.min((out.len() - done) / size).min(usize::try_from(self.left).unwrap_or(usize::MAX));
            let src = e.bytes(self.at, take);
            let dst = &mut out[done..done + take * size];
            if e.held == dtype {
                dst.copy_from_slice(src);
            } else {
                wide.resize(take * 4, 0);
                narrow::to_i32(e.held, src, &mut wide);
                let all = match dtype {
                    Dtype::U8 => narrow::to_u8(&wide, dst),
                    Dtype::U16 => narrow::to_u16(&wide, dst),
                    Dtype::I32 => {
                        dst.copy_from_slice(&wide);
                        0
                    }
                };
                if narrow::fit(all) > dtype {
                    let numbers = wide.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n));
                    return Err(numbers.into_iter().find(|n| narrow::fit(*n) > dtype).unwrap_or(all));
                }
            }
            self.at += take;
            self.left -= take as u64;
            done += take * size;
        }
        Ok(done)
    }

    /// Fills `out` with as many whole numbers as it has room for; the bytes written.
    pub fn fill(&mut self, out: &mut [u8]) -> usize {
        let size = self.rows.wire.size();
        let mut done = 0;
        while self.left > 0 && out.len() - done >= size {
            let Some(e) = self.rows.extents.get(self.extent) else { break };
            let here = e.items - self.at;
            if here == 0 {
                self.extent += 1;
                self.at = 0;
                continue;
            }
            let take = here.min((out.len() - done) / size).min(usize::try_from(self.left).unwrap_or(usize::MAX));
            let src = e.bytes(self.at, take);
            let dst = &mut out[done..done + take * size];
            if self.rows.wire == Dtype::I32 {
                narrow::to_i32(e.held, src, dst);
            } else {
                dst.copy_from_slice(src);
            }
            self.at += take;
            self.left -= take as u64;
            done += take * size;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(numbers: &[i32]) -> Vec<u8> {
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    fn read(rows: &Arc<Rows>, from: u64, items: u64, step: usize) -> Vec<u8> {
        let mut reader = Reader::new(rows.clone(), from, items);
        let mut out = Vec::new();
        let mut buf = vec![0; step];
        loop {
            let n = reader.fill(&mut buf);
            if n == 0 {
                break;
            }
            out.extend_from_slice(&buf[..n]);
        }
        assert_eq!(reader.left(), 0);
        out
    }

    #[test]
    fn numbers_come_back_whatever_width_they_needed() {
        let arena = Arena::new(64 << 20);
        let numbers: Vec<i32> = (0..200_000)
            .map(|i| {
                if i == 70_000 {
                    300
                } else if i == 150_000 {
                    -1
                } else {
                    i % 251
                }
            })
            .collect();
        let bytes = wire(&numbers);
        for hint in [0, 200_000, 1000] {
            let mut rows = Rows::new(&arena, Dtype::I32, hint);
            for part in bytes.chunks(40_000) {
                rows.push(part).unwrap();
            }
            let rows = Arc::new(rows);
            assert_eq!((rows.items(), rows.held()), (200_000, arena.used()));
            assert!(read(&rows, 0, 200_000, 48 << 10) == bytes);
            assert!(read(&rows, 69_999, 100_000, 4099) == bytes[69_999 * 4..169_999 * 4]);
            drop(rows);
            assert_eq!(arena.used(), 0);
        }
    }

    #[test]
    fn ids_up_to_255_take_one_byte_and_a_page_at_most_is_lost() {
        let arena = Arena::new(64 << 20);
        let bytes = wire(&vec![255; 1_000_000]);
        let mut rows = Rows::new(&arena, Dtype::I32, 1_000_000);
        rows.push(&bytes).unwrap();
        assert_eq!(arena.used(), 1_003_520);
    }

    #[test]
    fn a_full_arena_is_an_error_and_what_was_held_is_given_back() {
        let arena = Arena::new(300 << 10);
        let mut rows = Rows::new(&arena, Dtype::I32, 0);
        let e = rows.push(&wire(&vec![1; 300_000])).unwrap_err();
        assert_eq!((e.kind.code(), e.limit), ("r3_arena_too_small", Some(307_200.0)));
        drop(rows);
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn the_front_can_be_given_up() {
        let arena = Arena::new(64 << 20);
        let numbers: Vec<i32> = (0..600_000).map(|i| i % 256).collect();
        let mut rows = Rows::new(&arena, Dtype::I32, 0);
        rows.push(&wire(&numbers)).unwrap();
        rows.discard_front(1);
        rows.discard_front(299_999);
        let rows = Arc::new(rows);
        assert_eq!(rows.items(), 300_000);
        assert!(read(&rows, 0, 300_000, 1 << 16) == wire(&numbers[300_000..]));
        assert!(read(&rows, 5, 10, 4) == wire(&numbers[300_005..300_015]));
    }

    #[test]
    fn bytes_can_be_read_as_another_width_afterwards() {
        let arena = Arena::new(64 << 20);
        let bytes: Vec<u8> = (0..100_003u32).map(|i| (i * 31) as u8).collect();
        let mut rows = Rows::new(&arena, Dtype::I32, 0);
        rows.push(&bytes[..100_000]).unwrap();
        let rows = Arc::new(rows.reinterpret(Dtype::U8, &bytes[100_000..]).unwrap());
        assert_eq!((rows.wire(), rows.items()), (Dtype::U8, 100_003));
        assert!(read(&rows, 0, 100_003, 999) == bytes);
    }
}
