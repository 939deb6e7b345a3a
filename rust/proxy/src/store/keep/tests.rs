use super::*;
use crate::store::Rows;

fn rows(arena: &Arena, numbers: &[i32]) -> Part {
    let mut rows = Rows::new(arena, Dtype::I32, numbers.len());
    rows.push(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    Part { items: numbers.len() as u64, rows: Arc::new(rows), from: 0 }
}

fn meta(dtype: Dtype, rows: u64) -> Meta {
    let texts = || ("w1".to_owned(), "r3~0".to_owned());
    let (weight_version, rid) = texts();
    Meta { dtype, layers: 2, top_k: 2, start: 1, rows, attempt: 3, weight_version, rid }
}

struct Lab {
    root: PathBuf,
    arena: Arena,
    held: Arc<AtomicU64>,
}

impl Lab {
    fn new(cap: u64) -> Self {
        let root = std::env::temp_dir().join(format!("r3-keep-{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&root).unwrap();
        Self { root, arena: Arena::new(cap), held: Arc::default() }
    }

    fn store(&self, keep: Duration, spill: bool) -> Store {
        let held = Arc::clone(&self.held);
        let spill = spill.then(|| {
            let dir = self.root.join("spill");
            fs::create_dir_all(&dir).unwrap();
            dir
        });
        let place = Place { root: self.root.clone(), spill, keep };
        Store::new(&self.arena, place, move |bytes| held.store(bytes, Ordering::Relaxed))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn an_object_has_its_header_its_rows_and_its_checksum() {
    let lab = Lab::new(1 << 20);
    let store = lab.store(HOUR, false);
    let pin = store.put(meta(Dtype::U8, 2), &rows(&lab.arena, &[1, 2, 3, 250, 5, 6, 7, 8])).unwrap();
    let object = Arc::clone(pin.object());
    let bytes = fs::read(&object.path).unwrap();
    assert_eq!(&bytes[HEADER..], [1, 2, 3, 250, 5, 6, 7, 8]);
    assert_eq!(object.crc32, crc32fast::hash(&bytes[HEADER..]));
    assert_eq!(&bytes[40..44], object.crc32.to_le_bytes());
    pin.keep();
    drop(pin);
    assert_eq!(store.get(object.id).unwrap().id, object.id);
    assert_eq!(id_of(&id_text(object.id)), Some(object.id));
    store.delete(object.id).unwrap();
    assert_eq!(store.get(object.id).unwrap_err(), Absent::Deleted);
    assert_eq!(store.delete(object.id).unwrap_err(), Absent::Deleted);
    assert_eq!(store.get(7).unwrap_err(), Absent::Unknown);
    assert!(!object.path.exists());
}

#[test]
fn numbers_that_do_not_fit_the_models_dtype_are_an_error_and_leave_nothing() {
    let lab = Lab::new(1 << 20);
    let store = lab.store(HOUR, false);
    for (dtype, n) in [(Dtype::U8, 256), (Dtype::U16, 65_536), (Dtype::U8, -1)] {
        let e = store.put(meta(dtype, 1), &rows(&lab.arena, &[1, 2, n, 4])).unwrap_err();
        assert_eq!((e.kind, e.measured), (Kind::R3Mismatch, Some(f64::from(n as u32))));
    }
    let pin = store.put(meta(Dtype::I32, 1), &rows(&lab.arena, &[1, 70_000, -1, 4])).unwrap();
    assert_eq!(fs::read(&pin.object().path).unwrap()[HEADER + 4..HEADER + 12], [0x70, 0x11, 1, 0, 255, 255, 255, 255]);
    drop(pin);
    assert_eq!((store.usage(), lab.arena.used()), ((0, 0, 0), 0));
    assert_eq!(store.ends().unsent.load(Ordering::Relaxed), 1, "a pin that was not kept deletes its object");
}

#[test]
fn objects_expire_and_are_counted_by_whether_they_were_read() {
    let lab = Lab::new(1 << 20);
    let store = lab.store(Duration::from_millis(1), false);
    let mut ids = Vec::new();
    for _ in 0..2 {
        let pin = store.put(meta(Dtype::U8, 1), &rows(&lab.arena, &[1, 2, 3, 4])).unwrap();
        pin.keep();
        ids.push(pin.object().id);
        if ids.len() == 1 {
            pin.object().open().unwrap();
        }
    }
    assert_eq!(lab.held.load(Ordering::Relaxed), 2 * (HEADER as u64 + 4));
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(store.get(ids[0]).unwrap_err(), Absent::Expired, "not served after its time even when not swept");
    assert_eq!(store.sweep(), 2);
    let ends = store.ends();
    let counts = [&ends.expired_read, &ends.expired_unread, &ends.deleted].map(|n| n.load(Ordering::Relaxed));
    assert_eq!((counts, lab.held.load(Ordering::Relaxed), lab.arena.used()), ([1, 1, 0], 0, 0));
}

#[test]
fn a_full_arena_refuses_or_spills_and_never_evicts() {
    let lab = Lab::new(20_000);
    let full = |spill: bool| {
        let store = lab.store(HOUR, spill);
        let first = store.put(meta(Dtype::I32, 900), &rows(&lab.arena, &vec![9; 3600])).unwrap();
        let second = store.put(meta(Dtype::I32, 900), &rows(&lab.arena, &vec![9; 3600]));
        assert!(first.object().path.exists());
        (store, first, second)
    };
    let (_store, first, second) = full(false);
    assert_eq!(second.unwrap_err().kind, Kind::R3ArenaTooSmall);
    drop(first);
    let (store, _first, second) = full(true);
    let second = second.unwrap();
    assert!(second.object().path.starts_with(lab.root.join("spill")));
    assert_eq!((store.usage().0, store.usage().2), (2, HEADER as u64 + 14_400));
    assert_eq!(second.object().open().unwrap().metadata().unwrap().len(), HEADER as u64 + 14_400);
}

#[test]
fn the_directory_goes_with_its_store_and_a_dead_ones_with_the_next_start() {
    let lab = Lab::new(1 << 20);
    let count = || fs::read_dir(&lab.root).unwrap().count();
    let living = lab.store(HOUR, false);
    let pin = living.put(meta(Dtype::U8, 1), &rows(&lab.arena, &[1, 2, 3, 4])).unwrap();
    // A router that was killed: its directory is there, its lock is not.
    let dead = lab.root.join("r3router-store-1-dead");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("owner"), "1\n").unwrap();
    fs::write(dead.join("a.r3"), "rows").unwrap();
    let other = lab.root.join("r3router-engine-1");
    fs::create_dir(&other).unwrap();
    let next = lab.store(HOUR, false);
    assert!(!dead.exists() && other.exists() && pin.object().path.exists(), "only what is dead and ours goes");
    assert_eq!(next.ends().recovered.load(Ordering::Relaxed), 1);
    drop(pin);
    drop((living, next));
    assert_eq!(count(), 1);
}
