//! What a seed means: a fleet, what the router is told of it, a workload, and the faults that happen to it.
use std::sync::Arc;
use std::time::Duration;

use r3router_core::admission::{AdmissionConfig, R3Need, WindowMode};
use r3router_core::policy::{Assignment, Policy, PolicyConfig};
use r3router_core::topology::{Allocation, EngineFacts, Role};

use crate::rng::Rng;

/// Nanoseconds of virtual time.
pub(crate) type Ns = u64;
/// One second.
pub(crate) const SEC: Ns = 1_000_000_000;
/// One millisecond.
pub(crate) const MS: Ns = 1_000_000;
/// Tokens of one link of a prefix chain; what the truth caches by.
pub(crate) const BLOCK: u64 = 512;

/// What an engine really is. Per-rank figures.
#[derive(Clone, Debug)]
pub(crate) struct Truth {
    pub(crate) max_running: u32,
    pub(crate) extra: u32,
    pub(crate) mamba: Option<(u32, u32)>,
    pub(crate) pool: u64,
    pub(crate) page: u64,
    pub(crate) chunk: u64,
    /// The engine's own clock from reservation to KV.
    pub(crate) waiting: Ns,
    /// Prefill, tokens a second.
    pub(crate) rate: u64,
    /// One decode step.
    pub(crate) step: Ns,
    pub(crate) transfer: Ns,
    /// R3 text that the engine's front end emits, bytes a second.
    pub(crate) egress: u64,
}

/// One engine of the plan.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) url: Arc<str>,
    pub(crate) role: Role,
    pub(crate) ranks: u16,
    pub(crate) truth: Truth,
    pub(crate) told: EngineFacts,
    /// Between two reports.
    pub(crate) every: Ns,
    /// From measuring to arriving at the router.
    pub(crate) delay: Ns,
}

/// One client call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) at: Ns,
    pub(crate) prompt: u32,
    pub(crate) max_new: Option<u32>,
    pub(crate) out: u32,
    pub(crate) key: u64,
    pub(crate) prefix: Arc<[u64]>,
    /// From arrival; `None` waits for ever.
    pub(crate) patience: Option<Ns>,
    pub(crate) body: u64,
    pub(crate) r3: Option<R3Need>,
    /// When the client leaves, from arrival.
    pub(crate) leaves: Option<Ns>,
    pub(crate) fate: Fate,
    /// Which worker it names, by a number that is taken modulo the workers that there are then; `None` for none.
    pub(crate) names: Option<u64>,
}

/// What happens to an attempt of a call at the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Fine,
    /// A leg answers 4xx.
    Rejected,
    /// A leg answers 5xx, breaks, or says 503.
    Fails(Role, u8),
    /// The transfer begins and never ends.
    Stuck,
    /// The task that holds the permit goes away at some moment after the bind.
    Vanishes(Ns),
}

/// What happens to the fleet.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The process dies; the router hears of it `heard` later, and it comes back `back` after that.
    Dies {
        engine: usize,
        heard: Ns,
        back: Ns,
    },
    /// One rank answers nothing and is reported no more.
    RankHangs {
        engine: usize,
        rank: u16,
        lasts: Ns,
    },
    /// No report arrives.
    Silent {
        engine: usize,
        lasts: Ns,
    },
    /// Reports arrive late.
    Late {
        engine: usize,
        by: Ns,
        lasts: Ns,
    },
    /// Reports hold nonsense.
    Lies {
        engine: usize,
        lasts: Ns,
    },
    /// Load that is not ours.
    Foreign {
        engine: usize,
        rank: u16,
        rows: u32,
        tokens: u64,
        lasts: Ns,
    },
    /// Decode pushes requests out.
    Retracts {
        engine: usize,
        rank: u16,
        lasts: Ns,
    },
    Drains {
        engine: usize,
        lasts: Ns,
    },
    Pauses {
        lasts: Ns,
    },
    /// The facts are told again, with other gaps.
    Retold {
        engine: usize,
    },
}

/// Everything that a seed decides.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) config: AdmissionConfig,
    pub(crate) engines: Vec<Engine>,
    pub(crate) calls: Vec<Call>,
    pub(crate) faults: Vec<(Ns, Fault)>,
    /// Facts are complete and true, nothing is foreign, nothing fails: the engines themselves must then never queue.
    pub(crate) honest: bool,
    /// One way over the network.
    pub(crate) net: Ns,
    /// Bind to delivery, at most.
    pub(crate) delivery: Ns,
    /// Retries of a failed attempt.
    pub(crate) retries: u32,
    /// When each engine is registered.
    pub(crate) joins: Vec<Ns>,
    /// Seed of what is drawn while the run goes on.
    pub(crate) run: u64,
}

impl Plan {
    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let honest = rng.percent(25);
        let regular = rng.percent(20);
        let engines = fleet(rng, honest, regular);
        let ranks: u64 = engines.iter().map(|e| u64::from(e.ranks)).sum();
        let pool = engines.iter().map(|e| e.truth.pool).max().unwrap_or(1);
        let with_r3 = rng.percent(50);
        let arena = rng.range(8 << 20, 200 << 20);
        let mut calls = workload(rng, honest, ranks, pool, with_r3.then_some(arena));
        let faults = if honest { Vec::new() } else { faults(rng, &engines) };
        let late_start = !honest && rng.percent(10);
        let joins = engines.iter().map(|_| if late_start { rng.range(0, 3000) * MS } else { 0 }).collect();
        // Numbers of their own, so that the rest of a seed is what it was before there were policies.
        let own = &mut Rng::new(seed ^ 0x0090_11C1);
        let policies = policies(own);
        if own.percent(15) {
            for call in &mut calls {
                call.names = own.percent(30).then(|| own.bits());
            }
        }
        let config = AdmissionConfig {
            policies,
            window: match rng.range(0, 9) {
                0 => WindowMode::Static(rng.range(1, 8) as u32),
                1 => WindowMode::Unbounded,
                _ => WindowMode::Computed,
            },
            queue_max_requests: if rng.percent(10) { rng.range(1, 20) as usize } else { 100_000 },
            queue_max_bytes: if rng.percent(5) { rng.range(10_000, 200_000) } else { 1 << 30 },
            kv_margin: rng.pick(&[0.0, 0.05, 0.05, 0.1]),
            default_max_new_tokens: rng.pick(&[256, 4096]),
            stale_after: Duration::from_millis(rng.pick(&[1000, 2000, 2000, 5000])),
            max_overtakes: rng.pick(&[0, 1, 4, 16, 64]),
            arena_bytes: arena,
            affinity_bytes: rng.pick(&[0, 4096, 1 << 20]),
            breaker_threshold: rng.pick(&[0, 1, 3, 10]),
            breaker_open_for: Duration::from_millis(rng.range(200, 10_000)),
            seed: rng.bits(),
            ..AdmissionConfig::default()
        };
        Self {
            config,
            engines,
            calls,
            faults,
            honest,
            net: rng.range(50_000, 5 * MS),
            delivery: if honest { 100_000 * SEC } else { rng.range(1, 20) * SEC },
            joins,
            retries: if honest { 0 } else { rng.range(0, 2) as u32 },
            run: rng.bits(),
        }
    }
}

/// The defaults half of the time, else any for each role.
fn policies(rng: &mut Rng) -> PolicyConfig {
    const ALL: [Policy; 9] = [
        Policy::CacheAware,
        Policy::Headroom,
        Policy::Random,
        Policy::RoundRobin,
        Policy::PowerOfTwo,
        Policy::Bucket,
        Policy::Manual,
        Policy::ConsistentHashing,
        Policy::PrefixHash,
    ];
    if rng.percent(50) {
        return PolicyConfig::default();
    }
    PolicyConfig {
        of: [rng.pick(&ALL), rng.pick(&ALL), rng.pick(&ALL)],
        assignment: rng.pick(&[Assignment::MinGroup, Assignment::MinLoad, Assignment::Random]),
        key_idle: Duration::from_secs(rng.pick(&[1, 10, 10_000])),
        bucket_interval: Duration::from_secs(rng.pick(&[1, 5])),
    }
}

fn fleet(rng: &mut Rng, honest: bool, regular: bool) -> Vec<Engine> {
    let mut engines = Vec::new();
    if regular {
        side(rng, honest, Role::Regular, &mut engines);
    } else {
        side(rng, honest, Role::Prefill, &mut engines);
        side(rng, honest, Role::Decode, &mut engines);
    }
    engines
}

fn side(rng: &mut Rng, honest: bool, role: Role, engines: &mut Vec<Engine>) {
    let total = if rng.percent(70) { rng.skewed(1, 8) } else { rng.skewed(1, 64) } as u16;
    let base = truth(rng);
    let uniform = rng.percent(50);
    let mut left = total;
    while left > 0 {
        let ranks = rng.pick(&[1u16, 1, 2, 3, 4, 6, 7, 8, 8, 16]).min(left);
        left -= ranks;
        let truth = if uniform { base.clone() } else { truth(rng) };
        let told = if honest { facts(&truth) } else { gaps(rng, facts(&truth)) };
        let name = match role {
            Role::Prefill => 'p',
            Role::Decode => 'd',
            Role::Regular => 'r',
        };
        engines.push(Engine {
            url: format!("http://{name}{}:1", engines.len()).into(),
            role,
            ranks,
            truth,
            told,
            every: rng.range(250, 900) * MS,
            delay: rng.range(1, 40) * MS,
        });
        if engines.iter().filter(|e| e.role == role).count() >= 12 {
            break;
        }
    }
}

fn truth(rng: &mut Rng) -> Truth {
    let max_running = rng.skewed(1, 128) as u32;
    let pool = rng.skewed(8_000, 400_000);
    let extra = if max_running <= 32 { 2 * max_running } else { 0 };
    let per = rng.pick(&[1u32, 1, 2, 3]);
    Truth {
        max_running,
        extra: if rng.percent(70) { extra } else { rng.range(0, 8) as u32 },
        mamba: rng.percent(40).then(|| (per * rng.skewed(1, 64) as u32 + rng.range(0, 2) as u32, per)),
        pool,
        page: rng.pick(&[1, 16, 64]),
        chunk: rng.pick(&[2048, 4096, 8192]),
        waiting: rng.range(60, 300) * SEC,
        // A full pool takes 0.1 to 2 s to compute, and its R3 text 0.1 to 3 s to emit.
        rate: rng.skewed(pool / 2, pool * 10),
        step: rng.range(2, 20) * MS,
        transfer: rng.range(1, 200) * MS,
        egress: rng.skewed(pool * 400, pool * 12_000),
    }
}

/// Everything that can be told of an engine, true.
pub(crate) fn facts(truth: &Truth) -> EngineFacts {
    EngineFacts {
        max_running: Some(truth.max_running),
        extra_slots: Some(truth.extra),
        mamba_slots: truth.mamba.map(|(slots, _)| slots),
        mamba_slots_per_request: truth.mamba.map(|(_, per)| per),
        max_total_tokens: Some(truth.pool),
        page_size: Some(truth.page as u32),
        reserved_decode_tokens: Some(512),
        chunked_prefill_size: Some(truth.chunk as u32),
        max_input_tokens: Some(truth.pool),
        waiting_timeout: Some(Duration::from_nanos(truth.waiting)),
        allocation: Allocation::Early,
        reports_load: true,
    }
}

/// Facts with some of them missing, and some wrong.
pub(crate) fn gaps(rng: &mut Rng, mut facts: EngineFacts) -> EngineFacts {
    if rng.percent(20) {
        facts.max_running = None;
    }
    if rng.percent(30) {
        facts.extra_slots = None;
    }
    if rng.percent(20) {
        facts.mamba_slots = None;
    }
    if rng.percent(30) {
        // The wrong setting: one slot, where the engine takes more.
        facts.mamba_slots_per_request = rng.percent(50).then_some(1);
    }
    if rng.percent(20) {
        facts.max_total_tokens = None;
    }
    if rng.percent(30) {
        facts.page_size = None;
    }
    if rng.percent(50) {
        facts.reserved_decode_tokens = None;
    }
    if rng.percent(20) {
        facts.chunked_prefill_size = None;
    }
    if rng.percent(50) {
        facts.max_input_tokens = None;
    }
    if rng.percent(50) {
        facts.waiting_timeout = None;
    }
    facts.reports_load = !rng.percent(20);
    facts
}

fn workload(rng: &mut Rng, honest: bool, ranks: u64, pool: u64, arena: Option<u64>) -> Vec<Call> {
    let count = (rng.skewed(3, 30) + ranks * rng.range(0, 2)).min(120);
    let keys = rng.pick(&[1, 2, 5, 12]);
    let span = rng.range(0, 6) * SEC;
    let burst = rng.percent(40);
    let shared: Vec<u64> = (0..64).map(|_| rng.bits()).collect();
    let (low, high) = rng.pick(&[(1, 64), (8, 8), (1, 4), (2, 40)]);
    let impatient = rng.percent(30);
    let mut calls: Vec<Call> = (0..count)
        .map(|index| {
            let oversized = rng.percent(3);
            let prompt = if oversized {
                pool * 11 / 10 + rng.range(1, 100_000)
            } else {
                rng.skewed((pool / high / 4).max(1), (pool / low * 7 / 10).max(1))
            };
            let max_new = rng.percent(70).then(|| rng.skewed(1, 6000) as u32);
            let blocks = prompt / BLOCK;
            let prefix: Arc<[u64]> = if rng.percent(40) {
                let common = rng.range(0, blocks.min(64)) as usize;
                let own = rng.bits();
                (0..blocks.min(80))
                    .map(|b| if (b as usize) < common { shared[b as usize] } else { own ^ b.wrapping_mul(0x9E37_79B9) })
                    .collect()
            } else {
                Arc::from([])
            };
            let rows = prompt + 64;
            let r3 = arena.filter(|_| rng.percent(70)).map(|arena| R3Need {
                prefill_text: rows * 1280,
                decode_text: rows * 128,
                arena: if rng.percent(3) { arena + rng.range(1, arena) } else { (rows * 240).min(arena) },
            });
            let at = if burst { index % 3 * SEC / 4 } else { rng.range(0, span) };
            Call {
                at,
                prompt: prompt as u32,
                max_new,
                out: rng.skewed(1, u64::from(max_new.unwrap_or(500)).min(600)) as u32,
                key: rng.range(1, keys),
                prefix,
                patience: if impatient && rng.percent(60) { Some(rng.range(0, 8000) * MS) } else { None },
                body: rng.skewed(50, 60_000),
                r3,
                leaves: (!honest && rng.percent(12)).then(|| rng.range(0, 6000) * MS),
                fate: if honest { Fate::Fine } else { fate(rng) },
                names: None,
            }
        })
        .collect();
    calls.sort_by_key(|c| c.at);
    calls
}

fn fate(rng: &mut Rng) -> Fate {
    match rng.range(0, 99) {
        0..=79 => Fate::Fine,
        80..=84 => Fate::Rejected,
        85..=90 => Fate::Fails(rng.pick(&[Role::Prefill, Role::Decode]), rng.range(0, 4) as u8),
        91..=94 => Fate::Stuck,
        _ => Fate::Vanishes(rng.range(0, 3000) * MS),
    }
}

fn faults(rng: &mut Rng, engines: &[Engine]) -> Vec<(Ns, Fault)> {
    let count = rng.range(0, 6);
    (0..count)
        .map(|_| {
            let engine = rng.range(0, engines.len() as u64 - 1) as usize;
            let rank = rng.range(0, u64::from(engines[engine].ranks) - 1) as u16;
            let truth = &engines[engine].truth;
            let lasts = rng.range(100, 5000) * MS;
            let fault = match rng.range(0, 10) {
                0 => Fault::Dies { engine, heard: rng.range(0, 3000) * MS, back: rng.range(0, 3000) * MS },
                1 => Fault::RankHangs { engine, rank, lasts },
                2 => Fault::Silent { engine, lasts },
                3 => Fault::Late { engine, by: rng.range(100, 4000) * MS, lasts },
                4 => Fault::Lies { engine, lasts },
                5 | 6 => Fault::Foreign {
                    engine,
                    rank,
                    rows: rng.range(1, u64::from(truth.max_running)) as u32,
                    tokens: rng.range(1, truth.pool),
                    lasts,
                },
                7 => Fault::Retracts { engine, rank, lasts },
                8 => Fault::Drains { engine, lasts },
                9 => Fault::Pauses { lasts },
                _ => Fault::Retold { engine },
            };
            (rng.range(0, 6000) * MS, fault)
        })
        .collect()
}
