//! How long one admission takes, and what it allocates, with 100,000 requests queued, at 8, 64 and 1,024 ranks.
//!
//! A cycle is what one request costs the router in steady state: one KV delivery, one finished attempt, one new request, and the
//! poll that binds the next one. `BENCH_CYCLES=n` fixes the number of cycles and `BENCH_ONLY=ranks/load`
//! picks one row, for callgrind and perf.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a bench")]
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use r3router_core::admission::{Admission, AdmissionConfig, Decision, Outcome, Permit, R3Need, Request};
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{Allocation, EngineFacts, Role, WorkerId, WorkerSpec};

/// Requests that wait while decisions are timed.
const QUEUED: usize = 100_000;
/// Cycles that are timed for each row.
const CYCLES: u64 = 200_000;
/// Cycles before the clock starts.
const WARM_UP: u64 = 50_000;
/// Virtual time of a cycle.
const STEP: Duration = Duration::from_micros(50);
/// KV pool of a rank, tokens.
const POOL: u64 = 5_000_000;

/// Counts allocations of the whole process.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator with the caller's own arguments; counting touches no memory of theirs.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What the requests look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// 57k tokens, 54k of them shared, one kind.
    Uniform,
    /// 100 tokens to half a pool, 64 keys; the pools are nearly full, so that most heads do not fit most ranks.
    Mixed,
}

struct Bench {
    core: Admission,
    workers: Vec<(WorkerId, Role, u16)>,
    now: Moment,
    out: Vec<Decision>,
    undelivered: VecDeque<Permit>,
    running: VecDeque<Permit>,
    prefixes: Vec<Arc<[u64]>>,
    load: Load,
    random: u64,
    /// Attempts that run on decode in steady state.
    populated: usize,
    bound: u64,
    refused: u64,
}

fn facts() -> EngineFacts {
    EngineFacts {
        max_running: Some(128),
        extra_slots: Some(0),
        mamba_slots: Some(128),
        mamba_slots_per_request: Some(1),
        max_total_tokens: Some(POOL),
        page_size: Some(64),
        reserved_decode_tokens: Some(512),
        chunked_prefill_size: Some(8192),
        max_input_tokens: Some(POOL),
        waiting_timeout: Some(Duration::from_secs(300)),
        allocation: Allocation::Early,
        reports_load: true,
    }
}

impl Bench {
    fn new(ranks: u16, load: Load) -> Self {
        let config = AdmissionConfig {
            queue_max_requests: 2 * QUEUED,
            queue_max_bytes: u64::MAX,
            arena_bytes: u64::MAX / 2,
            ..AdmissionConfig::default()
        };
        let mut core = Admission::new(config, Box::new(|| {}));
        let mut workers = Vec::new();
        let now = Moment(1_000_000_000);
        let half = ranks / 2;
        let dp = half.min(8);
        for role in [Role::Prefill, Role::Decode] {
            for n in 0..half / dp {
                let url = format!("http://{role:?}-{n}:30000").into();
                let id = core.add_worker(WorkerSpec { url, role, ranks: dp, facts: facts() }, now);
                workers.push((id, role, dp));
            }
        }
        let prefixes =
            (0..64u64).map(|group| (0..105).map(|b| (group << 32 | b).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect());
        Self {
            core,
            workers,
            now,
            out: Vec::with_capacity(QUEUED),
            undelivered: VecDeque::with_capacity(QUEUED),
            running: VecDeque::with_capacity(2 * QUEUED),
            prefixes: prefixes.collect(),
            load,
            populated: usize::from(half) * if load == Load::Uniform { 40 } else { 24 },
            random: 0x2545_F491_4F6C_DD1D,
            bound: 0,
            refused: 0,
        }
    }

    fn bits(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn request(&mut self) -> Request {
        let bits = self.bits();
        let key = bits % 64;
        let prefix = self.prefixes[key as usize].clone();
        let base = Request { key, deadline: Moment::NEVER, body_bytes: 400_000, ..Request::default() };
        match self.load {
            Load::Uniform => {
                let r3 = R3Need { prefill_text: 97 << 20, decode_text: 1 << 20, arena: 18 << 20 };
                Request { prompt_tokens: 57_000, max_new_tokens: Some(2048), prefix, r3: Some(r3), ..base }
            }
            Load::Mixed => {
                // Uniform in the logarithm, from 100 tokens to half a pool.
                let unit = (bits >> 20) as f64 / (1u64 << 44) as f64;
                let prompt_tokens = (100.0 * (POOL as f64 / 200.0).powf(unit)) as u32;
                Request { prompt_tokens, max_new_tokens: Some((bits >> 40) as u32 % 8192), ..base }
            }
        }
    }

    fn submit(&mut self) {
        let request = self.request();
        self.core.submit(request, self.now).expect("room in the queue");
    }

    /// Every rank says what the ledger expects: nothing foreign.
    fn report(&mut self, reports: &mut Vec<RankReport>) {
        for w in 0..self.workers.len() {
            let (id, role, ranks) = self.workers[w];
            reports.clear();
            for rank in 0..ranks {
                let decode = role == Role::Decode;
                reports.push(RankReport {
                    rank,
                    measured_at: self.now,
                    running: Some(0),
                    waiting_total: Some(0),
                    transfer: decode.then_some(0),
                    prealloc: decode.then_some(0),
                    retracted: Some(0),
                    max_total_tokens: Some(POOL),
                    max_running: Some(128),
                    ..RankReport::default()
                });
            }
            self.core.report(id, reports, self.now);
        }
    }

    fn take(&mut self) -> u64 {
        let mut bound = 0;
        for decision in self.out.drain(..) {
            match decision {
                Decision::Bind(b) => {
                    bound += 1;
                    self.undelivered.push_back(b.permit);
                }
                Decision::Refuse(..) => self.refused += 1,
            }
        }
        bound
    }

    /// One delivery, one end, as many new requests as were bound last, one poll. Gives what was bound.
    fn cycle(&mut self, submits: u64) -> u64 {
        self.now = self.now + STEP;
        if let Some(permit) = self.undelivered.pop_front() {
            self.core.delivered(&permit, self.now);
            self.core.leg_ended(&permit, Role::Prefill, self.now);
            self.running.push_back(permit);
        }
        // Decode ranks stay populated; when nothing fits any more, one leaves so that one can come.
        let over = self.running.len() > self.populated || submits == 0;
        if let Some(permit) = if over { self.running.pop_front() } else { None } {
            self.core.finish(permit, Outcome::Completed { output_tokens: 1000 }, self.now);
        }
        for _ in 0..submits {
            self.submit();
        }
        self.core.poll(self.now, &mut self.out);
        self.take()
    }
}

struct Row {
    cycles: u64,
    bound: u64,
    spent: Duration,
    allocations: u64,
    report: Duration,
    open: usize,
}

fn measure(ranks: u16, load: Load, cycles: u64) -> Row {
    let mut bench = Bench::new(ranks, load);
    let mut reports = Vec::with_capacity(8);
    bench.report(&mut reports);
    for _ in 0..QUEUED {
        bench.submit();
    }
    let mut last = 0;
    // The reports stay fresh in virtual time; their cost is measured apart.
    let every = (Duration::from_millis(500).as_nanos() / STEP.as_nanos()) as u64;
    for n in 0..WARM_UP {
        if n % every == 0 {
            bench.report(&mut reports);
        }
        last = bench.cycle(last);
    }
    let (mut spent, mut report, mut allocations, mut rounds) = (Duration::ZERO, Duration::ZERO, 0, 0u32);
    let mut left = cycles;
    let bound_before = bench.bound;
    while left > 0 {
        let start = Instant::now();
        bench.report(&mut reports);
        report += start.elapsed();
        rounds += 1;
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let start = Instant::now();
        let run = left.min(every);
        for _ in 0..run {
            last = bench.cycle(last);
            bench.bound += last;
        }
        spent += start.elapsed();
        allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
        left -= run;
    }
    assert_eq!(bench.refused, 0, "nothing may be refused");
    Row {
        cycles,
        bound: bench.bound - bound_before,
        spent,
        allocations,
        report: report / rounds / u32::from(ranks),
        open: bench.undelivered.len() + bench.running.len(),
    }
}

fn main() {
    let cycles = std::env::var("BENCH_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(CYCLES);
    let only = std::env::var("BENCH_ONLY").ok();
    println!("{QUEUED} requests queued; a cycle is deliver + finish + submit + poll\n");
    println!(
        "| ranks | load | decisions/s | ns/decision | ns/cycle | allocations/decision | bound/cycle | open | ns/rank report |"
    );
    println!("|---:|---|---:|---:|---:|---:|---:|---:|---:|");
    for ranks in [8u16, 64, 1024] {
        for load in [Load::Uniform, Load::Mixed] {
            let name = format!("{load:?}").to_lowercase();
            if only.as_ref().is_some_and(|o| *o != format!("{ranks}/{name}")) {
                continue;
            }
            let row = measure(ranks, load, cycles);
            let each = |n: u64| row.spent.as_nanos() as f64 / n.max(1) as f64;
            println!(
                "| {ranks} | {name} | {:.0} | {:.0} | {:.0} | {:.4} | {:.3} | {} | {} |",
                row.bound as f64 / row.spent.as_secs_f64(),
                each(row.bound),
                each(row.cycles),
                row.allocations as f64 / row.bound.max(1) as f64,
                row.bound as f64 / row.cycles as f64,
                row.open,
                row.report.as_nanos(),
            );
        }
    }
}
