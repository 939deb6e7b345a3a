//! Which ranks have which prompt prefix in their cache, with a hard limit in bytes.
//!
//! A table leads from chained block hashes to runs: blocks that follow one another and that the same ranks have. Prompts come
//! in few pieces (a shared beginning, a conversation, what is new), and so in few runs: giving a rank 54,000 tokens that others
//! have is one write, not one for each of 211 blocks. Where a prompt leaves a run in the middle, the run is split there.
//!
//! The table is set-associative, like a processor's cache: each hash belongs to one line of four entries, and an insert takes
//! the place of the oldest of them. So the limit holds at every insert, nothing is ever rehashed, and a probe is one line of
//! memory. Ranks are named by slot; a slot is reused only after a sweep has taken its name out.
use runs::{Run, Runs};

pub use crate::wire::BLOCK_TOKENS;

mod runs;

/// Ranks that one run can name: enough to spread a hot prefix, few enough for half a line of memory. With three of them, a prefix
/// that more than half of the requests share fed three of eight prefill ranks, and the others computed it again and again.
pub const REPLICAS: usize = 7;
const WAYS: usize = 4;
/// Words of an entry: the hash; and the run, the block's place in it, and the entry's age.
const WORDS: usize = 2;
/// Words of a line, and so of a cache line, with which lines are aligned.
const LINE: usize = WAYS * WORDS;
/// Most bytes of an entry: its own, and those of a run that has no other.
const ENTRY_BYTES: usize = 8 * WORDS + runs::BYTES;
/// Blocks of one run at most; places are 16 bits.
const LONGEST_RUN: usize = 1 << 15;
/// Runs that one insert sweeps while a sweep is due.
const SWEEP_RUNS: usize = 64;

/// A prefix that ranks have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Blocks of the prompt that they have.
    pub blocks: usize,
    /// Rank slots + 1; 0 means none.
    slots: [u16; REPLICAS],
}

impl Match {
    /// The rank slots.
    pub fn slots(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        self.slots.iter().filter(|&&s| s != 0).map(|&s| u32::from(s) - 1)
    }

    /// Whether `slot` is among them.
    pub fn has(&self, slot: u32) -> bool {
        self.slots().any(|s| s == slot)
    }

    /// Whether both name the same ranks.
    pub fn same_ranks(&self, other: &Self) -> bool {
        self.slots == other.slots
    }

    /// Whether no rank has any block.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0 || self.slots.iter().all(|&s| s == 0)
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Affinity {
    /// Entries. Hash 0 is an empty one.
    table: Vec<u64>,
    /// Where the first line is.
    origin: usize,
    lines: usize,
    runs: Runs,
    /// Inserts and hits, for ages.
    ticks: u64,
    /// Ticks of one age step, so that ages span a few turns of the table.
    age_shift: u32,
}

/// What an entry leads to.
#[derive(Clone, Copy, Debug)]
struct Lead {
    run: u32,
    /// The block's place in the run, counted from where the run began before it was split.
    place: u16,
    /// When the run had been used last, when this was looked up.
    age: u16,
}

impl Lead {
    fn pack(self) -> u64 {
        u64::from(self.run) | u64::from(self.place) << 32 | u64::from(self.age) << 48
    }

    fn unpack(word: u64) -> Self {
        Self { run: word as u32, place: (word >> 32) as u16, age: (word >> 48) as u16 }
    }
}

impl Affinity {
    /// An empty table of at most `bytes`. Memory is touched only where prefixes are.
    pub fn new(bytes: usize) -> Self {
        // Room to align the first line, and for the run that is made before the entries it replaces are known.
        let lines = bytes.saturating_sub(8 * LINE + runs::BYTES) / (ENTRY_BYTES * WAYS);
        if lines == 0 {
            return Self::default();
        }
        let table = vec![0; (lines + 1) * LINE];
        let origin = table.as_ptr().align_offset(8 * LINE).min(LINE);
        let entries = lines * WAYS;
        Self {
            table,
            origin,
            lines,
            runs: Runs::new(entries + 1),
            age_shift: entries.ilog2().saturating_sub(12),
            ..Self::default()
        }
    }

    /// Bytes of the table and its runs.
    pub fn bytes(&self) -> usize {
        self.table.len() * 8 + self.runs.bytes()
    }

    /// Where the line of a hash begins.
    fn line(&self, hash: u64) -> usize {
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.origin + ((mixed * self.lines as u64) >> 32) as usize * LINE
    }

    fn age(&self) -> u16 {
        (self.ticks >> self.age_shift) as u16
    }

    /// Finds the entry of `hash`.
    fn find(&self, hash: u64) -> Option<usize> {
        if self.lines == 0 || hash == 0 {
            return None;
        }
        let start = self.line(hash);
        (start..start + LINE).step_by(WORDS).find(|&at| self.table[at] == hash)
    }

    fn lead(&self, entry: usize) -> Lead {
        Lead::unpack(self.table[entry + 1])
    }

    /// The ranks that have the block of `hash`. Marks its run as used.
    fn probe(&mut self, hash: u64) -> Option<[u16; REPLICAS]> {
        let lead = self.lead(self.find(hash)?);
        let age = self.age();
        let run = self.runs.get_mut(lead.run)?;
        run.age = age;
        Some(run.slots)
    }

    /// The longest known prefix of a chain and the ranks that have it. `alive` says which slots count.
    pub fn longest(&mut self, chain: &[u64], alive: impl Fn(u32) -> bool) -> Match {
        let mut found = Match::default();
        if self.lines == 0 || chain.is_empty() {
            return found;
        }
        self.ticks += 1;
        let keep = |slots: [u16; REPLICAS]| slots.map(|s| if s != 0 && alive(u32::from(s) - 1) { s } else { 0 });
        // The whole chain first: repeated prompts and samples of one prompt end there.
        let (mut low, mut high) = (0, chain.len());
        let mut middle = chain.len();
        while low < high {
            let slots = self.probe(chain[middle - 1]).map(keep).filter(|s| s.iter().any(|&s| s != 0));
            if let Some(slots) = slots {
                found = Match { blocks: middle, slots };
                low = middle;
            } else {
                high = middle - 1;
            }
            middle = (low + high).div_ceil(2);
        }
        found
    }

    /// `slot` has, or will have, the whole chain; it already had its first `known` blocks.
    pub fn insert(&mut self, chain: &[u64], known: usize, slot: u32) {
        let Ok(name) = u16::try_from(slot + 1) else { return };
        if self.lines == 0 {
            return;
        }
        if !self.runs.swept() {
            self.runs.sweep(SWEEP_RUNS);
        }
        // From the end: each step leads over a whole run.
        let mut end = chain.len();
        while end > known {
            if let Some(entry) = self.find(chain[end - 1]) {
                end = self.join(&chain[..end], entry, name);
            } else {
                let mut first = end - 1;
                while first > known && end - first < LONGEST_RUN && self.find(chain[first - 1]).is_none() {
                    first -= 1;
                }
                self.begin(&chain[first..end], name);
                end = first;
            }
        }
    }

    /// A run of blocks that nobody has.
    fn begin(&mut self, blocks: &[u64], name: u16) {
        let mut fresh = Run { first: 0, end: blocks.len() as u16, age: self.age(), ..Run::default() };
        fresh.add(name);
        let Some(run) = self.runs.take(fresh) else { return };
        // Its first blocks may have to leave for its last ones.
        self.runs.hold(run);
        for (place, &hash) in blocks.iter().enumerate() {
            self.put(hash, Lead { run, place: place as u16, age: self.age() });
        }
        self.runs.release(run);
    }

    /// The rank gets the blocks of a run up to the chain's last one, whose entry is given. Returns where the run begins in the
    /// chain.
    fn join(&mut self, chain: &[u64], entry: usize, name: u16) -> usize {
        let Lead { mut run, place, .. } = self.lead(entry);
        let known = self.runs.get(run);
        let begin = chain.len() - 1 - usize::from(place.saturating_sub(known.first)).min(chain.len() - 1);
        if !known.slots.contains(&name)
            && place + 1 < known.end
            && let Some(head) = self.split(&chain[begin..], run, place)
        {
            run = head;
        }
        let age = self.age();
        if let Some(run) = self.runs.get_mut(run) {
            run.age = age;
            run.add(name);
        }
        begin
    }

    /// Makes the blocks up to `place`, which are `blocks`, a run of their own, and returns it. Only their hashes are at hand, so
    /// that they move and the blocks behind them stay.
    fn split(&mut self, blocks: &[u64], run: u32, place: u16) -> Option<u32> {
        let whole = self.runs.get(run);
        if self.runs.is_single(run) {
            // What was behind the last block is forgotten already.
            self.runs.get_mut(run)?.end = place + 1;
            return None;
        }
        let head = self.runs.take(Run { end: place + 1, ..whole })?;
        for &hash in blocks {
            let Some(entry) = self.find(hash) else { continue };
            let lead = self.lead(entry);
            if lead.run == run {
                self.table[entry + 1] = Lead { run: head, ..lead }.pack();
                self.runs.hold(head);
                self.runs.release(run);
            }
        }
        if let Some(tail) = self.runs.get_mut(run)
            && tail.end > place
        {
            tail.first = place + 1;
        }
        Some(head)
    }

    fn put(&mut self, hash: u64, lead: Lead) {
        if hash == 0 {
            return;
        }
        self.ticks += 1;
        let at = self.room(self.line(hash));
        self.table[at] = hash;
        self.table[at + 1] = lead.pack();
        self.runs.hold(lead.run);
    }

    /// An empty entry in a line, or that of the run that was used the longest ago.
    fn room(&mut self, start: usize) -> usize {
        let now = self.age();
        let mut victim = start;
        // Entries remember when their run had been used when they were looked at; only the oldest is looked up. Each look makes
        // one of them exact, so that after as many there is an oldest.
        for _ in 0..=WAYS {
            let mut oldest = 0;
            for at in (start..start + LINE).step_by(WORDS) {
                if self.table[at] == 0 {
                    return at;
                }
                let since = now.wrapping_sub(self.lead(at).age);
                if since >= oldest {
                    (oldest, victim) = (since, at);
                }
            }
            let lead = self.lead(victim);
            let used = self.runs.get(lead.run).age;
            if now.wrapping_sub(used) >= oldest {
                break;
            }
            self.table[victim + 1] = Lead { age: used, ..lead }.pack();
        }
        self.runs.release(self.lead(victim).run);
        self.table[victim] = 0;
        victim
    }

    /// Starts to take out every name of a removed rank. The slot may be reused once [`Affinity::swept`] says so.
    pub fn remove(&mut self, slot: u32) {
        if self.lines > 0 {
            self.runs.remove(slot);
        }
    }

    /// Whether nothing names removed ranks any more.
    pub fn swept(&self) -> bool {
        self.runs.swept()
    }

    /// Sweeps some runs for removed ranks.
    pub fn sweep(&mut self, runs: usize) {
        self.runs.sweep(runs);
    }

    /// Blocks that some rank has. Counts; for tests and the live view.
    pub fn entries(&self) -> usize {
        let entries = self.table.get(self.origin..).unwrap_or_default().chunks_exact(WORDS);
        entries.filter(|e| e[0] != 0 && self.runs.get(Lead::unpack(e[1]).run).slots != [0; REPLICAS]).count()
    }
}

#[cfg(test)]
mod tests;
