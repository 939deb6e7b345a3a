//! Waiting requests: fair between keys, FIFO inside a key, bounded in requests and bytes, left at once on cancel.
//!
//! Entries live in a slab and hang in intrusive lists, so that taking one out from anywhere is a few writes. Deadlines are in
//! a 4-ary heap that knows where each entry is. Keys with waiting requests form a ring in order of their turn.
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::admission::Request;
use crate::affinity::Match;
use crate::reason::Reason;
use crate::time::Moment;

/// No entry, no key.
pub const NIL: u32 = u32::MAX;

/// One waiting request.
#[derive(Debug)]
pub struct Entry {
    /// The request.
    pub request: Request,
    /// When it came, in the caller's clock.
    pub since: Moment,
    /// Pause time that had passed when it came, nanoseconds.
    pub paused_before: u64,
    /// How many younger requests went before it because it did not fit.
    pub overtaken: u32,
    /// Why it was not bound when it was last looked at.
    pub held: Reason,
    /// Which ranks had its prefix, and when that was looked up.
    pub found: Match,
    /// The same of decode ranks, where a policy asks for it.
    pub found_back: Match,
    /// See `found`.
    pub found_at: Moment,
    /// Since when it waits for the rank of its key while others have room; [`Moment::NEVER`] when it does not.
    pub key_since: Moment,
    generation: u32,
    live: bool,
    key: u32,
    previous: u32,
    next: u32,
    heap: u32,
}

#[derive(Debug)]
struct Key {
    name: u64,
    head: u32,
    tail: u32,
    len: u32,
    /// Ring neighbours.
    previous: u32,
    next: u32,
    /// The pass in which `resume` was set.
    pass: u64,
    /// Where that pass goes on in this key.
    resume: u32,
}

/// Names of keys are hashes already; what is left is to spread the small ones that tests and tools use over all bits.
#[derive(Clone, Copy, Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let mixed = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

#[derive(Clone, Copy, Debug)]
struct Due {
    at: u64,
    entry: u32,
}

/// See the module's text.
#[derive(Debug)]
pub struct Queue {
    entries: Vec<Entry>,
    free: Vec<u32>,
    keys: Vec<Key>,
    free_keys: Vec<u32>,
    by_name: HashMap<u64, u32, BuildHasherDefault<Spread>>,
    /// First and last key of the ring.
    ring: (u32, u32),
    /// The list of retries is a key outside of the ring.
    retries: (u32, u32),
    heap: Vec<Due>,
    len: usize,
    bytes: u64,
    pass: u64,
}

/// The key index of retries.
const RETRIES: u32 = u32::MAX - 1;

impl Default for Queue {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            keys: Vec::new(),
            free_keys: Vec::new(),
            by_name: HashMap::default(),
            ring: (NIL, NIL),
            retries: (NIL, NIL),
            heap: Vec::new(),
            len: 0,
            bytes: 0,
            pass: 0,
        }
    }
}

/// Where a pass over the queue stands.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    key: u32,
    entry: u32,
}

impl Queue {
    /// Waiting requests.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Keys with waiting requests.
    pub fn keys(&self) -> usize {
        self.by_name.len()
    }

    /// Waiting requests of an entry's key, itself among them; 1 for a retry.
    pub fn of_key(&self, index: u32) -> u32 {
        let key = self.entry(index).map_or(RETRIES, |e| e.key);
        if key == RETRIES { 1 } else { self.keys[key as usize].len }
    }

    /// Body bytes that wait.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The entry at `index`; a dead one only when the caller kept an index too long.
    pub fn entry(&self, index: u32) -> Option<&Entry> {
        self.entries.get(index as usize).filter(|e| e.live)
    }

    /// The entry at `index`, for marks.
    pub fn entry_mut(&mut self, index: u32) -> Option<&mut Entry> {
        self.entries.get_mut(index as usize).filter(|e| e.live)
    }

    /// The ticket number of an entry: its place and how often the place was used.
    pub fn ticket(&self, index: u32) -> u64 {
        let generation = self.entries.get(index as usize).map_or(0, |e| e.generation);
        u64::from(generation) << 32 | u64::from(index)
    }

    /// The entry of a ticket that still waits.
    pub fn find(&self, ticket: u64) -> Option<u32> {
        let index = ticket as u32;
        let entry = self.entry(index)?;
        (u64::from(entry.generation) == ticket >> 32).then_some(index)
    }

    /// Adds a request at the end of its key. `due` is its deadline in the queue's own clock, nanoseconds.
    pub fn push(&mut self, request: Request, since: Moment, paused_before: u64, due: u64) -> u32 {
        let key = if request.retry { RETRIES } else { self.key(request.key) };
        self.len += 1;
        self.bytes += request.body_bytes;
        let fill = |generation| Entry {
            request,
            since,
            paused_before,
            overtaken: 0,
            held: Reason::Queued,
            found: Match::default(),
            found_back: Match::default(),
            found_at: Moment::ZERO,
            key_since: Moment::NEVER,
            generation,
            live: true,
            key,
            previous: NIL,
            next: NIL,
            heap: NIL,
        };
        let index = if let Some(index) = self.free.pop() {
            let slot = &mut self.entries[index as usize];
            *slot = fill(slot.generation.wrapping_add(1));
            index
        } else {
            self.entries.push(fill(1));
            (self.entries.len() - 1) as u32
        };
        let tail = self.ends(key).1;
        self.entries[index as usize].previous = tail;
        if tail == NIL {
            *self.ends_mut(key).0 = index;
        } else {
            self.entries[tail as usize].next = index;
        }
        *self.ends_mut(key).1 = index;
        if key != RETRIES {
            self.keys[key as usize].len += 1;
        }
        self.heap.push(Due { at: due, entry: index });
        self.sift_up(self.heap.len() - 1);
        index
    }

    /// Takes an entry out.
    pub fn remove(&mut self, index: u32) -> Option<Request> {
        let entry = self.entries.get_mut(index as usize).filter(|e| e.live)?;
        entry.live = false;
        let request = std::mem::take(&mut entry.request);
        let (key, previous, next, heap) = (entry.key, entry.previous, entry.next, entry.heap);
        self.free.push(index);
        self.len -= 1;
        self.bytes -= request.body_bytes;
        if previous == NIL {
            *self.ends_mut(key).0 = next;
        } else {
            self.entries[previous as usize].next = next;
        }
        if next == NIL {
            *self.ends_mut(key).1 = previous;
        } else {
            self.entries[next as usize].previous = previous;
        }
        if key != RETRIES {
            self.keys[key as usize].len -= 1;
            if self.keys[key as usize].resume == index {
                self.keys[key as usize].resume = next;
            }
            if self.keys[key as usize].head == NIL {
                self.drop_key(key);
            }
        }
        self.unheap(heap as usize);
        Some(request)
    }

    fn ends(&self, key: u32) -> (u32, u32) {
        if key == RETRIES { self.retries } else { (self.keys[key as usize].head, self.keys[key as usize].tail) }
    }

    fn ends_mut(&mut self, key: u32) -> (&mut u32, &mut u32) {
        if key == RETRIES {
            (&mut self.retries.0, &mut self.retries.1)
        } else {
            let key = &mut self.keys[key as usize];
            (&mut key.head, &mut key.tail)
        }
    }

    // ---- keys -----------------------------------------------------------------------------------------------------------

    fn key(&mut self, name: u64) -> u32 {
        if let Some(&key) = self.by_name.get(&name) {
            return key;
        }
        let fresh = Key { name, head: NIL, tail: NIL, len: 0, previous: NIL, next: NIL, pass: 0, resume: NIL };
        let key = if let Some(key) = self.free_keys.pop() {
            self.keys[key as usize] = fresh;
            key
        } else {
            self.keys.push(fresh);
            (self.keys.len() - 1) as u32
        };
        self.by_name.insert(name, key);
        self.link_last(key);
        key
    }

    fn drop_key(&mut self, key: u32) {
        self.unlink(key);
        self.by_name.remove(&self.keys[key as usize].name);
        self.free_keys.push(key);
    }

    fn link_last(&mut self, key: u32) {
        let last = self.ring.1;
        self.keys[key as usize].previous = last;
        self.keys[key as usize].next = NIL;
        if last == NIL {
            self.ring.0 = key;
        } else {
            self.keys[last as usize].next = key;
        }
        self.ring.1 = key;
    }

    fn unlink(&mut self, key: u32) {
        let Key { previous, next, .. } = self.keys[key as usize];
        if previous == NIL {
            self.ring.0 = next;
        } else {
            self.keys[previous as usize].next = next;
        }
        if next == NIL {
            self.ring.1 = previous;
        } else {
            self.keys[next as usize].previous = previous;
        }
    }

    // ---- a pass ---------------------------------------------------------------------------------------------------------

    /// Begins a pass over the queue: retries first, then one request of each key in turn.
    pub fn begin(&mut self) -> Cursor {
        self.pass += 1;
        Cursor { key: RETRIES, entry: self.retries.0 }
    }

    /// The entry that the pass looks at, going on to the next key where one has no more.
    pub fn look(&mut self, cursor: &mut Cursor) -> Option<u32> {
        loop {
            if cursor.entry != NIL {
                return Some(cursor.entry);
            }
            cursor.key = match cursor.key {
                NIL => return None,
                RETRIES => self.ring.0,
                key => self.keys[key as usize].next,
            };
            if cursor.key == NIL {
                return None;
            }
            cursor.entry = self.start_of(cursor.key);
        }
    }

    /// Where this pass goes on in `key`.
    fn start_of(&self, key: u32) -> u32 {
        let key = &self.keys[key as usize];
        if key.pass == self.pass { key.resume } else { key.head }
    }

    /// The entry stays; the pass goes on behind it, in the same key while `deeper`, else in the next key.
    pub fn skip(&mut self, cursor: &mut Cursor, deeper: bool) {
        let Some(next) = self.entries.get(cursor.entry as usize).map(|e| e.next) else {
            cursor.entry = NIL;
            return;
        };
        if cursor.key != RETRIES && cursor.key != NIL {
            let key = &mut self.keys[cursor.key as usize];
            key.pass = self.pass;
            key.resume = next;
        }
        cursor.entry = if deeper || cursor.key == RETRIES { next } else { NIL };
    }

    /// Takes the entry that the pass looks at; its key goes to the end of the ring, and the pass goes on with the next key.
    pub fn take(&mut self, cursor: &mut Cursor) -> Option<Request> {
        let (key, entry) = (cursor.key, cursor.entry);
        let following = self.entries.get(entry as usize).map_or(NIL, |e| e.next);
        if key == RETRIES {
            cursor.entry = following;
            return self.remove(entry);
        }
        let after = self.keys.get(key as usize).map_or(NIL, |k| k.next);
        if self.keys[key as usize].pass != self.pass {
            self.keys[key as usize].pass = self.pass;
            self.keys[key as usize].resume = following;
        }
        let request = self.remove(entry);
        // Without a head it has left the ring.
        if self.keys[key as usize].head != NIL && self.ring.1 != key {
            self.unlink(key);
            self.link_last(key);
        }
        let next_key = if after == NIL { self.ring.0 } else { after };
        cursor.key = next_key;
        cursor.entry = if next_key == NIL { NIL } else { self.start_of(next_key) };
        request
    }

    /// The oldest moment at which a waiting request came. Looks at each key once.
    pub fn oldest(&self) -> Option<Moment> {
        let mut oldest = self.entry(self.retries.0).map(|e| e.since);
        let mut key = self.ring.0;
        while key != NIL {
            let k = &self.keys[key as usize];
            if let Some(e) = self.entry(k.head) {
                oldest = Some(oldest.map_or(e.since, |o| o.min(e.since)));
            }
            key = k.next;
        }
        oldest
    }

    // ---- deadlines ------------------------------------------------------------------------------------------------------

    /// The earliest deadline and its entry.
    pub fn earliest(&self) -> Option<(u64, u32)> {
        self.heap.first().map(|d| (d.at, d.entry))
    }

    fn place(&mut self, slot: usize, due: Due) {
        self.heap[slot] = due;
        self.entries[due.entry as usize].heap = slot as u32;
    }

    fn sift_up(&mut self, mut slot: usize) {
        let due = self.heap[slot];
        while slot > 0 {
            let parent = (slot - 1) / 4;
            if self.heap[parent].at <= due.at {
                break;
            }
            self.place(slot, self.heap[parent]);
            slot = parent;
        }
        self.place(slot, due);
    }

    fn sift_down(&mut self, mut slot: usize) {
        let due = self.heap[slot];
        loop {
            let first = 4 * slot + 1;
            let Some(least) = (first..(first + 4).min(self.heap.len())).min_by_key(|&c| self.heap[c].at) else { break };
            if self.heap[least].at >= due.at {
                break;
            }
            self.place(slot, self.heap[least]);
            slot = least;
        }
        self.place(slot, due);
    }

    fn unheap(&mut self, slot: usize) {
        let Some(last) = self.heap.pop() else { return };
        if slot < self.heap.len() {
            self.place(slot, last);
            self.sift_down(slot);
            self.sift_up(self.entries[last.entry as usize].heap as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(key: u64, bytes: u64) -> Request {
        Request { key, body_bytes: bytes, ..Request::default() }
    }

    fn push(q: &mut Queue, key: u64) -> u32 {
        q.push(request(key, 1), Moment(0), 0, 0)
    }

    fn drain(q: &mut Queue) -> Vec<u64> {
        let mut out = Vec::new();
        let mut cursor = q.begin();
        while q.look(&mut cursor).is_some() {
            out.push(q.take(&mut cursor).unwrap().key);
        }
        out
    }

    #[test]
    fn keys_take_turns_and_requests_of_a_key_stay_in_order() {
        let mut q = Queue::default();
        for key in [1, 1, 1, 1, 2, 2, 3] {
            push(&mut q, key);
        }
        assert_eq!(drain(&mut q), [1, 2, 3, 1, 2, 1, 1]);
        assert!(q.is_empty());
        assert_eq!(q.bytes(), 0);
    }

    #[test]
    fn a_key_that_was_skipped_keeps_its_turn() {
        let mut q = Queue::default();
        for key in [1, 2, 3] {
            push(&mut q, key);
        }
        let mut cursor = q.begin();
        q.look(&mut cursor);
        q.skip(&mut cursor, true);
        assert_eq!(q.look(&mut cursor), Some(1));
        assert_eq!(q.take(&mut cursor).unwrap().key, 2);
        assert_eq!(drain(&mut q), [1, 3]);
    }

    #[test]
    fn a_pass_looks_at_a_skipped_entry_once() {
        let mut q = Queue::default();
        for key in [1, 1, 2, 2] {
            push(&mut q, key);
        }
        let mut cursor = q.begin();
        let mut seen = Vec::new();
        while let Some(e) = q.look(&mut cursor) {
            seen.push(e);
            if e == 0 || e == 2 {
                q.skip(&mut cursor, true);
            } else {
                q.take(&mut cursor).unwrap();
            }
        }
        assert_eq!(seen, [0, 1, 2, 3]);
        assert_eq!(q.len(), 2);
    }

    #[test]
    fn retries_go_before_new_requests() {
        let mut q = Queue::default();
        push(&mut q, 1);
        q.push(Request { retry: true, key: 9, ..Request::default() }, Moment(0), 0, 0);
        assert_eq!(drain(&mut q), [9, 1]);
    }

    #[test]
    fn a_ticket_of_a_reused_place_finds_nothing() {
        let mut q = Queue::default();
        let a = push(&mut q, 1);
        let ticket = q.ticket(a);
        q.remove(a);
        let b = push(&mut q, 1);
        assert_eq!(a, b);
        assert_eq!(q.find(ticket), None);
        assert_eq!(q.find(q.ticket(b)), Some(b));
    }

    proptest! {
        /// Against a plain list: what waits, in which order inside a key, and which deadline is next.
        #[test]
        fn it_behaves_like_a_list(ops in proptest::collection::vec((0u8..5, 0u64..4, 0u64..100), 1..300)) {
            let mut q = Queue::default();
            let mut plain: Vec<(u64, u64, u64)> = Vec::new();
            for (op, key, due) in ops {
                match op {
                    0..=2 => {
                        let e = q.push(request(key, due), Moment(0), 0, due);
                        plain.push((q.ticket(e), key, due));
                    }
                    3 if !plain.is_empty() => {
                        let (ticket, ..) = plain.remove(due as usize % plain.len());
                        let e = q.find(ticket).unwrap();
                        q.remove(e).unwrap();
                    }
                    _ => {
                        let mut cursor = q.begin();
                        let mut skips = due % 3;
                        while let Some(e) = q.look(&mut cursor) {
                            if skips > 0 { skips -= 1; q.skip(&mut cursor, true); continue; }
                            let ticket = q.ticket(e);
                            q.take(&mut cursor).unwrap();
                            plain.retain(|p| p.0 != ticket);
                            break;
                        }
                    }
                }
                prop_assert_eq!(q.len(), plain.len());
                prop_assert_eq!(q.bytes(), plain.iter().map(|p| p.2).sum::<u64>());
                prop_assert_eq!(q.earliest().map(|d| d.0), plain.iter().map(|p| p.2).min());
            }
            // A full pass sees every entry once, FIFO inside each key.
            let mut cursor = q.begin();
            let mut seen = Vec::new();
            while let Some(e) = q.look(&mut cursor) { seen.push(q.ticket(e)); q.skip(&mut cursor, true); }
            for key in 0..4 {
                let want: Vec<u64> = plain.iter().filter(|p| p.1 == key).map(|p| p.0).collect();
                let got: Vec<u64> = seen.iter().copied().filter(|t| want.contains(t)).collect();
                prop_assert_eq!(got, want);
            }
            prop_assert_eq!(seen.len(), plain.len());
        }
    }
}
