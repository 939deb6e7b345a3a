//! Stores that follow one another, and directories that are removed under a living one.
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use r3router_core::error::Kind;
use r3router_core::r3::Dtype;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

struct Lab(PathBuf);

impl Lab {
    fn new() -> Self {
        let root = std::env::temp_dir().join(format!("r3-heirs-{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn store(&self, keep: Duration) -> Store {
        self.bounded(1 << 20, keep, Arc::default(), false)
    }

    fn bounded(&self, cap: u64, keep: Duration, told: Arc<AtomicU64>, spills: bool) -> Store {
        let spill = spills.then(|| self.0.join("disk"));
        if let Some(dir) = &spill {
            fs::create_dir_all(dir).unwrap();
        }
        let place = Place { root: self.0.clone(), spill, keep };
        Store::new(&Arena::new(cap), place, move |bytes| told.store(bytes, Ordering::Relaxed))
    }

    fn names(&self) -> Vec<String> {
        fs::read_dir(&self.0).unwrap().map(|d| d.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a client knows of an object: who holds it itself holds its bytes of the arena.
struct Made {
    id: Id,
    path: PathBuf,
    meta: Meta,
    crc32: u32,
}

/// An object of these bytes, as rows of one layer with one expert.
fn put(store: &Store, bytes: &[u8]) -> Made {
    let pin = try_put(store, bytes).unwrap();
    pin.keep();
    let object = pin.object();
    Made { id: object.id, path: object.path.clone(), meta: object.meta.clone(), crc32: object.crc32 }
}

fn try_put(store: &Store, bytes: &[u8]) -> Result<Pin, r3router_core::error::Error> {
    // Apart from the store's own budget, so that what is counted is the objects.
    let mut rows = Rows::new(&Arena::new(1 << 20), Dtype::U8, bytes.len());
    rows.push(bytes).unwrap();
    store.put(meta(bytes.len()), &Part { items: rows.items(), rows: Arc::new(rows), from: 0 })
}

fn meta(rows: usize) -> Meta {
    let (weight_version, rid) = ("w".to_owned(), "r".to_owned());
    Meta { dtype: Dtype::U8, layers: 1, top_k: 1, start: 0, rows: rows as u64, attempt: 1, weight_version, rid }
}

fn bytes_of(store: &Store, id: Id) -> Vec<u8> {
    let mut all = Vec::new();
    store.get(id).unwrap().open().unwrap().read_to_end(&mut all).unwrap();
    all.split_off(HEADER)
}

fn why(store: &Store, id: Id) -> Option<Absent> {
    store.get(id).err()
}

#[test]
fn each_of_two_routers_sees_what_the_other_made_and_deleted() {
    let lab = Lab::new();
    let (old, new) = (lab.store(HOUR), lab.store(HOUR));
    let (first, second) = (put(&old, b"first"), put(&old, b"second"));
    new.take_over(old.bequests());
    assert_eq!((new.usage().0, new.usage().1), (2, 2 * HEADER as u64 + 11), "seen, and counted, before anybody asks");
    assert_eq!(new.arena().used(), new.usage().1);
    {
        let found = new.get(first.id).unwrap();
        assert_eq!((&found.path, &found.meta, found.crc32), (&first.path, &first.meta, first.crc32));
    }
    // What the old one makes later is there at once, and everything with its bytes.
    let third = put(&old, b"third");
    for (object, bytes) in [(&first, &b"first"[..]), (&second, b"second"), (&third, b"third")] {
        assert_eq!(bytes_of(&new, object.id), bytes);
    }
    new.delete(first.id).unwrap();
    assert!(!first.path.exists());
    old.sweep();
    assert_eq!((why(&old, first.id), old.arena().used()), (Some(Absent::Deleted), 2 * HEADER as u64 + 11));
    old.delete(second.id).unwrap();
    assert_eq!(new.delete(second.id), Err(Absent::Deleted), "once");
    let fourth = put(&old, b"fourth");
    new.sweep();
    old.delete(fourth.id).unwrap();
    new.sweep();
    assert_eq!((why(&new, fourth.id), new.arena().used()), (Some(Absent::Deleted), HEADER as u64 + 5));
    assert_eq!(new.ends().inherited.load(Ordering::Relaxed), 4);
    assert_eq!(why(&new, 7), Some(Absent::Unknown));
    drop(old);
    assert_eq!(fs::read(&third.path).unwrap()[HEADER..], b"third"[..], "its path goes on to be right");
    assert_eq!(bytes_of(&new, third.id), b"third");
    new.sweep();
    new.delete(third.id).unwrap();
    new.sweep();
    assert_eq!((lab.names(), new.arena().used()), (Vec::<String>::new(), 0), "an empty directory goes");
}

#[test]
fn objects_of_ten_generations_are_all_there() {
    let lab = Lab::new();
    let mut store = lab.store(HOUR);
    let mut made = Vec::new();
    for generation in 0..10u8 {
        made.push((put(&store, &[generation; 100]), [generation; 100]));
        let next = lab.store(HOUR);
        next.take_over(store.bequests());
        store = next;
    }
    for (object, bytes) in &made {
        assert_eq!(bytes_of(&store, object.id), bytes);
        assert!(object.path.exists());
    }
    assert_eq!((store.usage().0, lab.names().len()), (10, 10));
    for (object, _) in &made[..9] {
        store.delete(object.id).unwrap();
    }
    store.sweep();
    assert_eq!((lab.names().len(), store.arena().used()), (1, HEADER as u64 + 100));
    drop(store);
    assert_eq!(lab.names(), Vec::<String>::new(), "without a next one, the last takes everything along");
}

#[test]
fn a_router_that_drains_for_long_is_seen_by_the_one_after_the_next() {
    let lab = Lab::new();
    let (first, second, third) = (lab.store(HOUR), lab.store(HOUR), lab.store(HOUR));
    let early = put(&first, b"early");
    second.take_over(first.bequests());
    third.take_over(second.bequests());
    drop(second);
    let late = put(&first, b"late");
    assert_eq!((bytes_of(&third, early.id), bytes_of(&third, late.id)), (b"early".to_vec(), b"late".to_vec()));
    // It ends between two looks: what it made last is counted without being asked for.
    let last = put(&first, b"last");
    drop(first);
    third.sweep();
    assert_eq!(third.usage().0, 3);
    assert_eq!(bytes_of(&third, last.id), b"last");
    drop(third);
    assert_eq!(lab.names(), Vec::<String>::new());
}

#[test]
fn a_new_router_that_does_not_start_takes_nothing_along() {
    let lab = Lab::new();
    let old = lab.store(HOUR);
    let object = put(&old, b"rows");
    let new = lab.store(HOUR);
    new.take_over(old.bequests());
    assert_eq!(bytes_of(&new, object.id), b"rows");
    drop(new);
    old.sweep();
    assert_eq!(bytes_of(&old, object.id), b"rows");
    drop(old);
    assert_eq!(lab.names(), Vec::<String>::new());
}

#[test]
fn what_a_killed_router_left_to_another_is_not_garbage() {
    let lab = Lab::new();
    let dead = lab.0.join("r3router-store-1-dead");
    fs::create_dir(&dead).unwrap();
    for (name, text) in [("owner", "1\n"), ("heirs", ""), ("0.tmp", "half"), ("ff.r3", "no object")] {
        fs::write(dead.join(name), text).unwrap();
    }
    let whole = dead.join(format!("{}.r3", id_text(5)));
    let header = meta(4).header(crc32fast::hash(b"rows"), 1, u64::MAX);
    fs::write(&whole, [&header[..], b"rows"].concat()).unwrap();
    let cut = dead.join(format!("{}.r3", id_text(6)));
    fs::write(&cut, [&header[..], b"row"].concat()).unwrap();
    let place = Place { root: lab.0.join("elsewhere"), spill: None, keep: HOUR };
    let heir = Store::new(&Arena::new(1 << 20), place, |_| {});
    heir.take_over(vec![Bequest { path: dead.clone(), spilled: false }]);
    // Another router on this host starts and looks for garbage.
    let other = lab.store(HOUR);
    assert_eq!(other.ends().recovered.load(Ordering::Relaxed), 0);
    assert_eq!(bytes_of(&heir, 5), b"rows");
    assert_eq!((why(&heir, 6), dead.join("0.tmp").exists()), (Some(Absent::Unknown), false));
    heir.delete(5).unwrap();
    heir.sweep();
    assert!(!dead.exists());
}

#[test]
fn time_goes_on_and_what_is_over_the_cap_is_kept() {
    let lab = Lab::new();
    let (old, told) = (lab.store(Duration::from_millis(300)), Arc::new(AtomicU64::new(0)));
    let object = put(&old, &[7; 5000]);
    let new = lab.bounded(4000, HOUR, Arc::clone(&told), false);
    new.take_over(old.bequests());
    drop(old);
    let held = HEADER as u64 + 5000;
    assert_eq!((new.arena().used(), new.arena().cap(), told.load(Ordering::Relaxed)), (held, 4000, held));
    assert_eq!(bytes_of(&new, object.id), [7; 5000]);
    std::thread::sleep(Duration::from_millis(310));
    assert_eq!(why(&new, object.id), Some(Absent::Expired));
    assert_eq!(new.sweep(), 1);
    assert!(!object.path.exists());
    assert_eq!((new.arena().used(), told.load(Ordering::Relaxed), lab.names()), (0, 0, Vec::new()));
}

#[test]
fn what_was_spilled_goes_on_to_be_no_part_of_the_arena() {
    let lab = Lab::new();
    let old = lab.bounded(1000, HOUR, Arc::default(), true);
    let full = old.arena().charge_inherited(20_000);
    let object = put(&old, &[7; 5000]);
    drop(full);
    let new = lab.bounded(1000, HOUR, Arc::default(), true);
    new.take_over(old.bequests());
    drop(old);
    assert_eq!(bytes_of(&new, object.id), [7; 5000]);
    assert_eq!((new.usage(), new.arena().used()), ((1, 0, HEADER as u64 + 5000), 0));
    new.delete(object.id).unwrap();
    drop(new);
    assert_eq!((lab.names(), fs::read_dir(lab.0.join("disk")).unwrap().count()), (vec!["disk".to_owned()], 0));
}

/// This store's directory.
fn dir(object: &Made) -> &Path {
    object.path.parent().unwrap()
}

#[test]
fn a_directory_that_was_removed_is_made_again() {
    let lab = Lab::new();
    let store = lab.store(HOUR);
    let before = put(&store, b"before");
    fs::remove_dir_all(dir(&before)).unwrap();
    let after = put(&store, b"after");
    assert_ne!(dir(&before), dir(&after));
    assert_eq!(why(&store, before.id), Some(Absent::Deleted));
    assert_eq!((bytes_of(&store, after.id), store.arena().used()), (b"after".to_vec(), HEADER as u64 + 5));
    assert_eq!(store.ends().lost.load(Ordering::Relaxed), 1);
    // Nobody asks for a reference: the sweep sees it, so that the arena has its bytes back.
    fs::remove_dir_all(&lab.0).unwrap();
    store.sweep();
    assert_eq!((store.usage().0, store.arena().used()), (0, 0));
    let again = put(&store, b"again");
    assert_eq!(bytes_of(&store, again.id), b"again");
    // A cleaner that takes the oldest file only: the rest goes on, and nothing is left at the end.
    fs::remove_file(dir(&again).join("owner")).unwrap();
    let other = put(&store, b"other");
    assert_ne!(dir(&again), dir(&other));
    assert_eq!((bytes_of(&store, again.id), bytes_of(&store, other.id)), (b"again".to_vec(), b"other".to_vec()));
    drop(store);
    assert_eq!(lab.names(), Vec::<String>::new());
}

#[test]
fn a_directory_that_cannot_be_made_is_the_routers_fault_until_it_is_mended() {
    let lab = Lab::new();
    let store = lab.store(HOUR);
    put(&store, b"before");
    fs::remove_dir_all(&lab.0).unwrap();
    fs::write(&lab.0, "a file").unwrap();
    let error = try_put(&store, b"rows").unwrap_err();
    assert_eq!((error.kind, error.http_status()), (Kind::R3StoreFailed, 500));
    assert!(error.message.contains(&*lab.0.to_string_lossy()), "{error}");
    assert!(error.advice.unwrap().contains("--r3-store-dir"));
    fs::remove_file(&lab.0).unwrap();
    let after = put(&store, b"after");
    assert_eq!(bytes_of(&store, after.id), b"after");
}

#[test]
fn rows_that_are_being_written_survive_their_directory() {
    let lab = Lab::new();
    let store = lab.store(HOUR);
    let mut draft = Draft::new(&store, Dtype::U8).unwrap();
    let numbers: Vec<u8> = (0..200_000u32).map(|n| (n * 7) as u8).collect();
    let wire: Vec<u8> = numbers.iter().flat_map(|n| i32::from(*n).to_le_bytes()).collect();
    assert_eq!(draft.push(&wire).unwrap(), wire.len());
    fs::remove_dir_all(&lab.0).unwrap();
    fs::create_dir(&lab.0).unwrap();
    let pin = draft.finish(meta(numbers.len()), None).unwrap();
    assert_eq!(pin.object().crc32, crc32fast::hash(&numbers));
    assert!(bytes_of(&store, pin.object().id) == numbers);
    drop(pin);
    drop(store);
    assert_eq!(lab.names(), Vec::<String>::new());
}
