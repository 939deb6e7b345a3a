//! An object while its rows come in: they are narrowed tile by tile straight into its file, so that they lie where the client will read
//! them before the sample has ended, and are neither held beside it nor copied again.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::{Dtype, narrow};

use super::arena::Charge;
use super::keep::{Fault, Id, Part, Pin, Store, id_text, now_ms};
use super::object::{HEADER, Meta};
use super::rows::{Reader, Rows};

/// Narrow bytes that are written at once.
const TILE: usize = 64 << 10;

/// See the module's text. Dropped before [`Draft::finish`], it leaves nothing.
pub struct Draft {
    store: Store,
    id: Id,
    dir: PathBuf,
    temporary: PathBuf,
    file: File,
    dtype: Dtype,
    /// Narrow bytes that are not in the file yet.
    tile: Vec<u8>,
    /// Bytes in the file, the header's place left out.
    written: u64,
    crc: crc32fast::Hasher,
    charge: Charge,
}

impl std::fmt::Debug for Draft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draft").field("dtype", &self.dtype).field("numbers", &self.items()).finish_non_exhaustive()
    }
}

impl Draft {
    /// An object without rows, whose numbers will be `dtype`.
    ///
    /// # Errors
    /// `R3ArenaTooSmall` when there is no room, `R3StoreFailed` when the directory cannot be used.
    pub fn new(store: &Store, dtype: Dtype) -> Result<Self, Error> {
        let charge = store.arena().charge(HEADER as u64)?;
        let dir = store.dir()?;
        let id: Id = rand::random();
        let temporary = dir.join(format!("{}.tmp", id_text(id)));
        let file = create(&temporary).map_err(|e| store.fault(Fault::System(e), dtype, 0, &dir))?;
        let (store, crc) = (store.clone(), crc32fast::Hasher::new());
        Ok(Self { store, id, dir, temporary, file, dtype, tile: Vec::with_capacity(TILE), written: 0, crc, charge })
    }

    /// Numbers so far.
    pub fn items(&self) -> u64 {
        (self.written + self.tile.len() as u64) / self.dtype.size() as u64
    }

    /// Appends int32 numbers as they are on the wire. Gives the bytes that were taken: fewer than all when a number does not fit the
    /// dtype.
    ///
    /// # Errors
    /// `R3ArenaTooSmall`, and what the file system says.
    pub fn push(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let size = self.dtype.size();
        let mut taken = 0;
        while bytes.len() - taken >= 4 {
            let room = (TILE - self.tile.len()) / size;
            if room == 0 {
                self.flush()?;
                continue;
            }
            let items = room.min((bytes.len() - taken) / 4);
            let (from, source) = (self.tile.len(), &bytes[taken..taken + items * 4]);
            self.tile.resize(from + items * size, 0);
            let target = &mut self.tile[from..];
            let all = match self.dtype {
                Dtype::U8 => narrow::to_u8(source, target),
                Dtype::U16 => narrow::to_u16(source, target),
                Dtype::I32 => {
                    target.copy_from_slice(source);
                    0
                }
            };
            if narrow::fit(all) > self.dtype {
                self.tile.truncate(from);
                return Ok(taken);
            }
            taken += items * 4;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.charge.absorb(self.store.arena().charge(self.tile.len() as u64)?);
        self.crc.update(&self.tile);
        let done = self.file.write_all_at(&self.tile, HEADER as u64 + self.written);
        done.map_err(|e| self.fault(e))?;
        self.written += self.tile.len() as u64;
        self.tile.clear();
        Ok(())
    }

    /// Gives the complete file its name.
    fn publish(&self) -> io::Result<PathBuf> {
        let path = self.dir.join(format!("{}.r3", id_text(self.id)));
        fs::rename(&self.temporary, &path)?;
        Ok(path)
    }

    /// Somebody has removed the directory: what is written is still here, and is copied to a new one.
    fn rescue(&mut self) -> Result<(), Error> {
        self.dir = self.store.dir()?;
        self.temporary = self.dir.join(format!("{}.tmp", id_text(self.id)));
        let copied = create(&self.temporary).and_then(|mut copy| {
            (&self.file).seek(SeekFrom::Start(0))?;
            io::copy(&mut &self.file, &mut copy)?;
            Ok(copy)
        });
        self.file = copied.map_err(|e| self.fault(e))?;
        Ok(())
    }

    fn fault(&self, e: io::Error) -> Error {
        self.store.fault(Fault::System(e), self.dtype, self.written, &self.dir)
    }

    /// The same numbers in the arena, for what cannot be told of them in this form.
    ///
    /// # Errors
    /// `R3ArenaTooSmall`, and what the file system says.
    pub fn into_rows(mut self) -> Result<Rows, Error> {
        self.flush()?;
        let items = usize::try_from(self.items()).unwrap_or(0);
        let mut rows = Rows::new(self.store.arena(), Dtype::I32, items);
        let mut at = 0;
        while at < self.written {
            let take = usize::try_from(self.written - at).unwrap_or(TILE).min(TILE);
            self.tile.resize(take, 0);
            let read = self.file.read_exact_at(&mut self.tile, HEADER as u64 + at);
            read.map_err(|e| self.fault(e))?;
            rows.push_narrow(self.dtype, &self.tile)?;
            at += take as u64;
        }
        self.tile.clear();
        Ok(rows)
    }

    /// Makes the object, with `more` behind its rows. `meta` says how many they are together.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn finish(mut self, meta: Meta, more: Option<&Part>) -> Result<Pin, Error> {
        if let Some(part) = more {
            let mut reader = Reader::new(Arc::clone(&part.rows), part.from, part.items);
            loop {
                if self.tile.len() == TILE {
                    self.flush()?;
                }
                let from = self.tile.len();
                self.tile.resize(TILE, 0);
                let filled = reader.fill_as(self.dtype, &mut self.tile[from..]);
                let filled =
                    filled.map_err(|n| self.store.fault(Fault::Range(n), self.dtype, self.written, &self.dir))?;
                self.tile.truncate(from + filled);
                if filled == 0 {
                    break;
                }
            }
        }
        self.flush()?;
        if self.written != meta.bytes() {
            let message = "the rows of an object are not as many as its reference says";
            return Err(Error::new(Kind::Internal, Source::Router, message)
                .with_limit(meta.bytes() as f64, self.written as f64));
        }
        let crc = std::mem::take(&mut self.crc).finalize();
        let created_ms = now_ms();
        let expires_ms = self.store.expiry(created_ms);
        let complete = self.file.write_all_at(&meta.header(crc, created_ms, expires_ms), 0);
        complete.map_err(|e| self.fault(e))?;
        let path = match self.publish() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.rescue()?;
                self.publish()
            }
            done => done,
        };
        let path = path.map_err(|e| self.fault(e))?;
        let charge = std::mem::replace(&mut self.charge, self.store.arena().charge(0)?);
        Ok(self.store.admit((self.id, path), meta, crc, expires_ms, Some(charge)))
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `finish` there is no file of this name any more.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Arena, Place};
    use std::time::Duration;

    fn wire(numbers: &[i32]) -> Vec<u8> {
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    fn lab(cap: u64) -> (PathBuf, Arena, Store) {
        let root = std::env::temp_dir().join(format!("r3-draft-{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&root).unwrap();
        let arena = Arena::new(cap);
        let place = Place { root: root.clone(), spill: None, keep: Duration::from_secs(60) };
        let store = Store::new(&arena, place, |_| {});
        (root, arena, store)
    }

    fn meta(dtype: Dtype, rows: u64) -> Meta {
        let (weight_version, rid) = (String::new(), "r".to_owned());
        Meta { dtype, layers: 2, top_k: 2, start: 0, rows, attempt: 1, weight_version, rid }
    }

    fn files(root: &std::path::Path) -> usize {
        let dirs = fs::read_dir(root).unwrap().map(|d| d.unwrap().path());
        dirs.map(|d| fs::read_dir(d).unwrap().filter(|f| f.as_ref().unwrap().path().extension().is_some()).count())
            .sum()
    }

    #[test]
    fn rows_of_both_legs_lie_in_one_file_narrow_with_their_checksum() {
        let (root, arena, store) = lab(8 << 20);
        for dtype in [Dtype::U8, Dtype::U16, Dtype::I32] {
            let numbers: Vec<i32> = (0..400_000).map(|i| i * 7 % 251).collect();
            let (first, second) = numbers.split_at(300_000);
            let mut draft = Draft::new(&store, dtype).unwrap();
            for piece in wire(first).chunks(48 << 10) {
                assert_eq!(draft.push(piece).unwrap(), piece.len());
            }
            assert_eq!(draft.items(), 300_000);
            let mut rows = Rows::new(&arena, Dtype::I32, 0);
            rows.push(&wire(second)).unwrap();
            let part = Part { rows: Arc::new(rows), from: 4, items: 99_996 };
            let pin = draft.finish(meta(dtype, 99_999), Some(&part)).unwrap();
            drop(part);
            let object = Arc::clone(pin.object());
            let bytes = fs::read(&object.path).unwrap();
            let wanted = [first, &second[4..]].concat();
            let narrow: Vec<u8> = wanted.iter().flat_map(|n| n.to_le_bytes()[..dtype.size()].to_vec()).collect();
            assert!(bytes[HEADER..] == narrow);
            assert_eq!(object.crc32, crc32fast::hash(&narrow));
            assert_eq!(&bytes[40..44], object.crc32.to_le_bytes());
            assert_eq!(arena.used(), HEADER as u64 + narrow.len() as u64, "charged to the byte");
            drop((pin, object)); // the last one that reads it gives its bytes back
            assert_eq!((arena.used(), files(&root)), (0, 0));
        }
        drop(store);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_number_that_does_not_fit_is_told_and_nothing_is_lost() {
        let (root, arena, store) = lab(8 << 20);
        let mut numbers: Vec<i32> = (0..50_000).map(|i| i % 256).collect();
        numbers[40_001] = 256;
        let bytes = wire(&numbers);
        let mut draft = Draft::new(&store, Dtype::U8).unwrap();
        let taken = draft.push(&bytes).unwrap();
        assert!(taken <= 40_001 * 4 && taken == usize::try_from(draft.items()).unwrap() * 4);
        let mut rows = draft.into_rows().unwrap();
        assert_eq!(files(&root), 0);
        rows.push(&bytes[taken..]).unwrap();
        let mut out = vec![0; bytes.len()];
        assert_eq!(Reader::new(Arc::new(rows), 0, 50_000).fill(&mut out), bytes.len());
        assert!(out == bytes);
        assert_eq!(arena.used(), 0);
        drop(store);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_full_arena_and_a_draft_that_is_given_up_leave_nothing() {
        let (root, arena, store) = lab(3 << 20);
        let mut draft = Draft::new(&store, Dtype::I32).unwrap();
        let e = draft.push(&wire(&vec![1; 1 << 20])).unwrap_err();
        assert_eq!(e.kind, Kind::R3ArenaTooSmall);
        drop(draft);
        assert_eq!((arena.used(), files(&root)), (0, 0));
        let mut draft = Draft::new(&store, Dtype::U8).unwrap();
        draft.push(&wire(&[1, 2, 3, 4])).unwrap();
        assert_eq!(draft.finish(meta(Dtype::U8, 2), None).unwrap_err().kind, Kind::Internal);
        assert_eq!((arena.used(), files(&root)), (0, 0));
        drop(store);
        fs::remove_dir_all(root).unwrap();
    }
}
