//! One task per registered engine: asks until it answers, brings it into choice, polls its load, checks its health, notices its death
//! and its return - which is a new generation.
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Uri;
use r3router_core::load::RankReport;
use r3router_core::topology::{EngineFacts, WorkerSpec};

use crate::app::{App, CONNECT};
use crate::ask::{NoAnswer, ask, get};
use crate::loads::{MambaGauge, Offset, Polled, mamba_gauges, rank_reports};
use crate::metrics::Counters;
use crate::probe::{Found, NotFound, Question, probe};
use crate::upstream::{Call, Fault, Pool};
use crate::worker::{Gone, Worker};
use crate::workers::{Entry, Phase};

/// Path of the load poll. Old engines ignore or know these sections.
const LOADS: &str = "/v1/loads?include=core,disagg";
/// How long a poll may take before it counts as unanswered.
const POLL_LIMIT: Duration = Duration::from_secs(5);
/// First pause between looks at an engine that does not answer; doubles up to the configured interval, at most [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between looks: an engine that comes up should not idle for long.
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// Pause between readings of the mamba gauges: engines refresh them every few dozen steps.
const GAUGES: Duration = Duration::from_secs(2);
/// Legs on a process that does not accept connections are given up after this long without a byte.
const SILENT: Duration = Duration::from_secs(10);

/// Starts the keeper of an entry.
pub fn spawn(app: &Arc<App>, entry: Arc<Entry>) {
    let app = Arc::clone(app);
    let runtime = app.runtime.clone();
    runtime.spawn(async move { keep(&app, &entry).await });
}

async fn keep(app: &Arc<App>, entry: &Arc<Entry>) {
    let (address, tls) = (entry.registration.address.clone(), Some(Arc::clone(&app.engine_tls)));
    let pool = Pool::secured(address, app.settings.upstream_idle_secs, CONNECT, tls, &app.allow);
    let mut old: Option<Arc<Worker>> = None;
    loop {
        let Some(found) = find(app, entry, &pool, old.as_ref()).await else { break };
        if let Some(old) = old.take() {
            // Whatever still runs there belongs to a process that is gone.
            end_generation(app, &old);
        }
        if let Some(Err(other)) = pool.peer().map(|at| app.registry.claim(entry, at)) {
            entry.change(|state| {
                state.phase = Phase::Failed;
                state.message =
                    format!("it is {} under another name; register an engine once", other.registration.shown);
            });
            break;
        }
        let Some(worker) = activate(app, entry, &pool, found) else { break };
        app.findings.due();
        let why = watch(app, entry, &worker).await;
        app.gate.remove_worker(worker.id);
        app.findings.due();
        let Some(why) = why else {
            old = Some(worker);
            break;
        };
        entry.change(|state| {
            state.phase = Phase::Down;
            state.message = why;
            state.worker = None;
        });
        old = Some(worker);
    }
    if entry.phase() != Phase::Removed
        && let Some(old) = old
    {
        end_generation(app, &old);
    }
    pool.close();
}

fn end_generation(app: &App, worker: &Worker) {
    if !worker.gone.is_set() {
        let legs = worker.open.load(std::sync::atomic::Ordering::Relaxed).max(0);
        tracing::warn!(worker = &*worker.url, legs, "a generation of the worker ended; what runs on it fails");
        worker.gone.set();
        app.live.worker_gone(worker.id);
    }
}

/// Asks until the engine answers: at last at a slow pace, since a person may mend what made it fail. `None` when it was removed.
async fn find(app: &Arc<App>, entry: &Arc<Entry>, pool: &Arc<Pool>, old: Option<&Arc<Worker>>) -> Option<Found> {
    let began = Instant::now();
    let mut pause = FIRST_PAUSE;
    let registration = &entry.registration;
    loop {
        if entry.phase() == Phase::Removed {
            return None;
        }
        let key = registration.key.get();
        let question = Question {
            pool,
            role: registration.role,
            key: key.as_ref(),
            bootstrap_port: registration.bootstrap_port,
            health: &app.settings.health_check_endpoint,
            health_limit: app.settings.health_check_timeout_secs,
            mamba_slots_per_request: app.settings.mamba_slots_per_request,
            waiting_timeout: app.settings.engine_waiting_timeout_secs,
            scale: app.clock.scale(),
        };
        let failed = tokio::select! {
            found = probe(&question) => match found {
                Ok(found) => return Some(found),
                Err(failed) => failed,
            },
            () = entry.look.notified() => continue,
        };
        let late = began.elapsed() >= app.settings.worker_startup_timeout_secs && old.is_none();
        let never = matches!(failed, NotFound::Never(..));
        entry.change(|state| {
            failed.why().clone_into(&mut state.message);
            if late && !never {
                state.message.push_str("; it did not come up within --worker-startup-timeout-secs");
            }
            if late || never {
                state.phase = Phase::Failed;
            }
        });
        if let Some(old) = old
            && matches!(failed, NotFound::Dead(_))
            && began.elapsed() > SILENT
            && silent_for(app, old) > SILENT
        {
            end_generation(app, old);
        }
        let interval = app.settings.worker_startup_check_interval;
        tokio::select! {
            () = tokio::time::sleep(if late || never { interval } else { pause }) => {}
            () = entry.look.notified() => {}
        }
        pause = (pause * 2).min(MAX_PAUSE).min(interval);
    }
}

fn silent_for(app: &App, worker: &Worker) -> Duration {
    let last = worker.last_bytes.load(std::sync::atomic::Ordering::Relaxed);
    app.clock.machine(app.clock.now().since(r3router_core::time::Moment(last)))
}

fn activate(app: &Arc<App>, entry: &Arc<Entry>, pool: &Arc<Pool>, found: Found) -> Option<Arc<Worker>> {
    let registration = &entry.registration;
    let spec = WorkerSpec {
        url: Arc::clone(&registration.shown),
        role: registration.role,
        ranks: found.ranks,
        facts: found.facts.clone(),
    };
    let mut made = None;
    // Under the entry's lock, so that a removal comes wholly before or wholly after.
    let active = entry.change(|state| {
        let drained = state.drained.of(found.ranks);
        let worker = app.gate.add_worker(spec, &drained, |id| {
            Arc::new(Worker {
                id,
                url: Arc::clone(&registration.shown),
                names: (0..found.ranks).map(|rank| format!("{}@{rank}", registration.shown).into()).collect(),
                role: registration.role,
                abilities: found.abilities,
                bootstrap_host: Arc::clone(&registration.address.host),
                bootstrap_port: found.bootstrap_port,
                key: registration.key.clone(),
                pool: Arc::clone(pool),
                gone: Gone::default(),
                suspect: Arc::clone(&entry.look),
                open: std::sync::atomic::AtomicI64::new(0),
                legs: Counters::default(),
                last_bytes: std::sync::atomic::AtomicU64::new(app.clock.now().0),
                reported: std::sync::atomic::AtomicU64::new(if found.facts.reports_load { 0 } else { u64::MAX }),
            })
        });
        state.phase = Phase::Active;
        state.message = format!("{} ranks", found.ranks);
        state.worker = Some(Arc::clone(&worker));
        state.found = Some(Arc::new(found));
        state.ejected = false;
        made = Some(worker);
    });
    if let Some(worker) = &made {
        *entry.last.lock() = Arc::downgrade(worker);
    }
    made.filter(|_| active)
}

/// The process behind a removed entry does not run any more: what runs on it fails now, whatever its sockets say.
#[cfg(feature = "kubernetes")]
pub(crate) fn dead(app: &App, entry: &Entry) {
    if let Some(worker) = entry.last.lock().upgrade() {
        end_generation(app, &worker);
    }
}

/// Polls until the engine is dead (the reason) or removed (`None`).
async fn watch(app: &Arc<App>, entry: &Arc<Entry>, worker: &Arc<Worker>) -> Option<String> {
    let mut facts = entry.state().found.map(|f| f.facts.clone()).unwrap_or_default();
    let mut offset = Offset::default();
    let mut gauges = Gauges { next: facts.mamba_slots.map(|_| Instant::now()), ranks: Vec::new() };
    let checks = entry.registration.health_checks && !app.settings.disable_health_check;
    let mut health = Health { next: Instant::now() + app.settings.health_check_interval_secs, bad: 0, good: 0 };
    let mut poll = tokio::time::interval(app.settings.poll_interval_ms);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let mut looked = false;
        tokio::select! {
            _ = poll.tick() => {}
            () = entry.look.notified() => looked = true,
        }
        if entry.phase() == Phase::Removed {
            return None;
        }
        worker.pool.sweep();
        if looked {
            // A leg could not connect and has taken the worker out of choice: it is dead, or comes back as a new generation.
            return Some("a connect was refused".to_owned());
        }
        if app.registry.reinstate(entry) {
            app.gate.set_draining(worker.id, false);
        }
        if facts.reports_load
            && let Err(dead) = poll_loads(app, worker, &mut facts, &mut offset, &mut gauges).await
        {
            return Some(dead);
        }
        if checks
            && Instant::now() >= health.next
            && let Err(dead) = check(app, entry, worker, &mut health).await
        {
            return Some(dead);
        }
    }
}

struct Gauges {
    next: Option<Instant>,
    ranks: Vec<(u16, MambaGauge)>,
}

async fn poll_loads(
    app: &Arc<App>,
    worker: &Arc<Worker>,
    facts: &mut EngineFacts,
    offset: &mut Offset,
    gauges: &mut Gauges,
) -> Result<(), String> {
    let sent = app.clock.now();
    let with_gauges = gauges.next.is_some_and(|next| Instant::now() >= next);
    let key = worker.key.get();
    let (loads, metrics) = tokio::join!(get(&worker.pool, LOADS, key.as_ref(), POLL_LIMIT), async {
        if with_gauges { get(&worker.pool, "/metrics", key.as_ref(), POLL_LIMIT).await.ok() } else { None }
    });
    let answer = match loads {
        Ok(answer) => answer,
        Err(NoAnswer::Fault(Fault::Connect(why))) => return Err(why),
        // A slow or broken poll is no death; the report grows stale and the admission knows what that means.
        Err(_) => return Ok(()),
    };
    if matches!(answer.status, 404 | 405 | 501) {
        facts.reports_load = false;
        worker.reported.store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
        app.gate.update_facts(worker.id, facts.clone());
        return Ok(());
    }
    let Some(value) = answer.json().filter(|_| answer.ok()) else { return Ok(()) };
    let mut reports =
        rank_reports(&value, Polled { sent, answered: app.clock.now(), scale: app.clock.scale() }, offset);
    if with_gauges {
        gauges.next = Some(Instant::now() + app.clock.machine(GAUGES));
        gauges.ranks = metrics
            .filter(crate::ask::Answer::ok)
            .and_then(|m| std::str::from_utf8(&m.body).ok().map(mamba_gauges))
            .unwrap_or_default();
        take_gauges(&mut reports, gauges, facts, app, worker);
    }
    if !reports.is_empty() {
        app.gate.report(worker.id, &reports);
        worker.reported.store(sent.0, std::sync::atomic::Ordering::Relaxed);
    }
    Ok(())
}

/// Puts gauges of the same moment into the reports, and learns the pool that the engine has really made.
fn take_gauges(reports: &mut [RankReport], gauges: &Gauges, facts: &mut EngineFacts, app: &App, worker: &Worker) {
    for report in reports {
        if let Some((_, gauge)) = gauges.ranks.iter().find(|(rank, _)| *rank == report.rank) {
            report.mamba_free = gauge.free();
        }
    }
    let pool = gauges.ranks.iter().filter_map(|(_, gauge)| gauge.pool()).min();
    if pool.is_some() && pool != facts.mamba_slots {
        facts.mamba_slots = pool;
        app.gate.update_facts(worker.id, facts.clone());
    }
}

struct Health {
    next: Instant,
    bad: u32,
    good: u32,
}

/// One health check. A worker that is slow is only taken out of choice while another of its role is in; bytes that came from it since
/// the check before count as life, and a pause excuses everything.
async fn check(app: &Arc<App>, entry: &Arc<Entry>, worker: &Arc<Worker>, health: &mut Health) -> Result<(), String> {
    let settings = &app.settings;
    let interval = settings.health_check_interval_secs;
    let Ok(uri) = settings.health_check_endpoint.parse::<Uri>() else { return Ok(()) };
    let call = Call::get(uri).with_key(worker.key.get().as_ref());
    let answer = ask(&worker.pool, &call, settings.health_check_timeout_secs).await;
    health.next = Instant::now() + interval;
    let why = match answer {
        Ok(answer) if answer.status < 500 => None,
        Ok(answer) => Some(format!("{} answered {}", settings.health_check_endpoint, answer.status)),
        Err(NoAnswer::Fault(Fault::Connect(why))) => return Err(why),
        Err(error) => Some(format!("{}: {error}", settings.health_check_endpoint)),
    };
    let Some(why) = why else {
        health.bad = 0;
        health.good += 1;
        if entry.state().ejected && health.good >= settings.health_success_threshold {
            app.gate.set_draining(worker.id, false);
            entry.change(|state| {
                state.ejected = false;
                "healthy again".clone_into(&mut state.message);
            });
        }
        return Ok(());
    };
    health.good = 0;
    let alive = silent_for(app, worker) < interval + settings.health_check_timeout_secs;
    if app.gate.is_paused() || alive {
        return Ok(());
    }
    health.bad += 1;
    if health.bad >= settings.health_failure_threshold && app.registry.eject(entry, why) {
        app.gate.set_draining(worker.id, true);
    }
    Ok(())
}
