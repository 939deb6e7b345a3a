//! The admission as its callers see it.
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::error::Kind;
use crate::load::RankReport;
use crate::topology::{EngineFacts, WorkerId, WorkerSpec};

mod ends;
mod limits;
mod pairs;
mod policies;
mod prefixes;
mod spread;
mod waiting;

fn t(secs: f64) -> Moment {
    // Far from zero, as the proxy's clock is.
    Moment::from_secs_f64(1000.0 + secs)
}

struct Lab {
    a: Admission,
    out: Vec<Decision>,
    woken: Arc<AtomicUsize>,
}

impl Lab {
    fn new(config: AdmissionConfig) -> Self {
        let woken = Arc::new(AtomicUsize::new(0));
        let told = Arc::clone(&woken);
        let wake = Box::new(move || {
            told.fetch_add(1, Ordering::Relaxed);
        });
        Self { a: Admission::new(config, wake), out: Vec::new(), woken }
    }

    fn worker(&mut self, role: Role, ranks: u16, facts: EngineFacts) -> WorkerId {
        self.worker_at(&format!("http://{role:?}{ranks}"), role, ranks, facts)
    }

    fn worker_at(&mut self, url: &str, role: Role, ranks: u16, facts: EngineFacts) -> WorkerId {
        let url = url.into();
        self.a.add_worker(WorkerSpec { url, role, ranks, facts }, t(0.0))
    }

    fn pd(config: AdmissionConfig, p: u16, d: u16, facts: EngineFacts) -> (Self, WorkerId, WorkerId) {
        let mut lab = Self::new(config);
        let pid = lab.worker(Role::Prefill, p, EngineFacts::default());
        let did = lab.worker(Role::Decode, d, facts);
        (lab, pid, did)
    }

    fn submit(&mut self, request: Request, secs: f64) -> Ticket {
        self.a.submit(request, t(secs)).unwrap()
    }

    fn poll(&mut self, secs: f64) -> Vec<Binding> {
        self.a.poll(t(secs), &mut self.out);
        let mut bound = Vec::new();
        let mut rest = Vec::new();
        for d in self.out.drain(..) {
            match d {
                Decision::Bind(b) => bound.push(b),
                refuse @ Decision::Refuse(..) => rest.push(refuse),
            }
        }
        self.out = rest;
        bound
    }

    fn refusals(&mut self) -> Vec<(Ticket, Error)> {
        self.out
            .drain(..)
            .map(|d| match d {
                Decision::Refuse(ticket, error) => (ticket, error),
                Decision::Bind(_) => panic!("a bind"),
            })
            .collect()
    }

    fn done(&mut self, b: Binding, secs: f64) {
        self.a.finish(b.permit, Outcome::Completed { output_tokens: 10 }, t(secs));
    }

    fn count(&self, name: &str) -> u64 {
        self.a.snapshot(t(0.0)).decisions.iter().find(|d| d.0 == name).unwrap().1
    }
}

fn ask(prompt: u32) -> Request {
    Request {
        prompt_tokens: prompt,
        max_new_tokens: Some(100),
        deadline: Moment::NEVER,
        body_bytes: 10,
        ..Default::default()
    }
}

fn held(lab: &Lab) -> (u32, u32, i64) {
    let s = lab.a.snapshot(t(0.0));
    (s.ranks.iter().map(|r| r.open).sum(), s.ranks.iter().map(|r| r.in_transfer).sum(), s.arena_reserved as i64)
}

fn chain(seed: u64, blocks: usize) -> Vec<u64> {
    let mut r = crate::room::SplitMix::new(seed);
    (0..blocks).map(|_| r.next() | 1).collect()
}
