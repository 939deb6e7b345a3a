//! The spans of an attempt: itself, its legs and its merge. They are made when it begins, since the ids of the legs go to the engines, and
//! leave together when it ends, since only then it is known what each of them came to.
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use http::{HeaderMap, StatusCode};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;

use super::{Attributes, Request, Side, Span, text};
use crate::metrics::LegResult;
use crate::worker::Worker;

/// A call to an engine.
#[derive(Debug)]
pub struct Leg {
    id: u64,
    role: Role,
    worker: Arc<Worker>,
    rank: Option<u16>,
    /// Which attempt it belongs to, from 1.
    attempt: u32,
    /// Bytes of the request's body.
    sent: AtomicU64,
    status: AtomicU16,
    received: AtomicU64,
    began: OnceLock<Instant>,
    first: OnceLock<Instant>,
    ended: OnceLock<(Instant, LegResult)>,
}

impl Leg {
    /// A call to `worker` that may be made.
    pub fn new(request: &Request, role: Role, worker: &Arc<Worker>, rank: Option<u16>, attempt: u32) -> Arc<Self> {
        Arc::new(Self {
            id: request.place().child().span,
            role,
            worker: Arc::clone(worker),
            rank,
            attempt,
            sent: AtomicU64::new(0),
            status: AtomicU16::new(0),
            received: AtomicU64::new(0),
            began: OnceLock::new(),
            first: OnceLock::new(),
            ended: OnceLock::new(),
        })
    }

    /// Says in the headers of the call where it comes from.
    pub fn mark(&self, request: &Request, headers: &mut HeaderMap) {
        request.mark(headers, self.id);
    }

    /// The call's body has so many bytes.
    pub fn sends(&self, bytes: u64) {
        self.sent.store(bytes, Ordering::Relaxed);
    }

    /// The call is made now.
    pub fn begin(&self) {
        let _ = self.began.set(Instant::now());
    }

    /// The head of the reply is here.
    pub fn answered(&self, status: StatusCode) {
        self.status.store(status.as_u16(), Ordering::Relaxed);
    }

    /// Bytes of the reply have come at `now`.
    pub fn received(&self, bytes: usize, now: Instant) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        let _ = self.first.set(now);
    }

    /// It is over. What is said first holds.
    pub fn end(&self, result: LegResult) {
        let _ = self.ended.set((Instant::now(), result));
    }

    /// It leaves by itself, below the request's span: it belongs to no attempt.
    pub fn leave(&self, request: &Request) {
        if let Some(span) = self.span(request, 0, Vec::new(), None) {
            request.take(span);
        }
    }

    /// Its span; `None` when the call was never made. `error` is what ended it.
    fn span(&self, request: &Request, parent: u64, more: Attributes, error: Option<&Error>) -> Option<Span> {
        let began = *self.began.get()?;
        let (ended, result) = *self.ended.get_or_init(|| (Instant::now(), LegResult::Cancelled));
        let address = self.worker.pool.address();
        let (name, role) = match self.role {
            Role::Prefill => ("prefill", "prefill"),
            Role::Decode => ("decode", "decode"),
            Role::Regular => ("engine", "regular"),
        };
        let mut attributes: Attributes = vec![
            ("http.request.method", "POST".into()),
            ("url.full", text(&format!("{}{}", address.url, request.path()))),
            ("server.address", text(address.host.trim_start_matches('[').trim_end_matches(']'))),
            ("server.port", u64::from(address.port).into()),
            ("http.request.body.size", self.sent.load(Ordering::Relaxed).into()),
            ("http.response.body.size", self.received.load(Ordering::Relaxed).into()),
            ("r3router.role", role.into()),
            ("r3router.worker", text(&self.worker.url)),
            ("r3router.result", result.name().into()),
        ];
        if let Some(rank) = self.rank {
            attributes.push(("r3router.rank", u64::from(rank).into()));
        }
        if self.attempt > 1 {
            attributes.push(("http.request.resend_count", u64::from(self.attempt - 1).into()));
        }
        let status = self.status.load(Ordering::Relaxed);
        if status > 0 {
            attributes.push(("http.response.status_code", u64::from(status).into()));
        }
        attributes.extend(more);
        let failed = !matches!(result, LegResult::Ok | LegResult::Cancelled);
        if failed {
            // The conventions want the status where that is what went wrong.
            let kind = if status >= 400 { text(&status.to_string()) } else { result.name().into() };
            attributes.push(("error.type", kind));
        }
        let mut span = request.span(name, (self.id, parent), (began, ended), attributes);
        span.side = Side::Client;
        if let Some(first) = self.first.get() {
            span.events.push(("first byte", request.at(*first)));
        }
        span.error = failed.then(|| error.map_or_else(|| result.name().to_owned(), brief));
        Some(span)
    }
}

fn brief(error: &Error) -> String {
    error.message.chars().take(256).collect()
}

/// See the module's text.
#[derive(Debug)]
pub struct Attempt {
    request: Arc<Request>,
    id: u64,
    number: u32,
    began: Instant,
    delivered: Option<Instant>,
    prefill: Option<Arc<Leg>>,
    decode: Arc<Leg>,
    merge: Option<(Instant, Option<Instant>)>,
    /// R3 text that prefill and decode have sent.
    r3: (u64, u64),
    error: Option<Error>,
}

impl Attempt {
    /// An attempt on these engines' ranks that begins now, the `number`th of its request.
    pub fn begin(
        request: &Arc<Request>,
        number: u32,
        prefill: Option<(&Arc<Worker>, u16)>,
        decode: (&Arc<Worker>, u16),
    ) -> Self {
        let leg = |role, (worker, rank)| Leg::new(request, role, worker, Some(rank), number);
        let role = if prefill.is_some() { Role::Decode } else { Role::Regular };
        Self {
            id: request.place().child().span,
            number,
            began: Instant::now(),
            delivered: None,
            prefill: prefill.map(|at| leg(Role::Prefill, at)),
            decode: leg(role, decode),
            merge: None,
            r3: (0, 0),
            error: None,
            request: Arc::clone(request),
        }
    }

    /// The leg of a role.
    pub fn leg(&self, role: Role) -> Option<&Arc<Leg>> {
        match role {
            Role::Prefill => self.prefill.as_ref(),
            Role::Decode | Role::Regular => Some(&self.decode),
        }
    }

    /// Says in the headers of a leg's call where it comes from, and notes that it has so many bytes.
    pub fn mark(&self, role: Role, headers: &mut HeaderMap, bytes: u64) {
        if let Some(leg) = self.leg(role) {
            leg.mark(&self.request, headers);
            leg.sends(bytes);
        }
    }

    /// The KV is on decode.
    pub fn delivered(&mut self) {
        self.delivered.get_or_insert_with(Instant::now);
    }

    /// What both legs said is being merged.
    pub fn merging(&mut self) {
        self.merge.get_or_insert_with(|| (Instant::now(), None));
    }

    /// So many bytes of R3 text came; all of the reply has when it is `whole`.
    pub fn merged(&mut self, prefill: u64, decode: u64, whole: bool) {
        self.r3 = (prefill, decode);
        if let Some((_, ended)) = self.merge.as_mut().filter(|_| whole) {
            ended.get_or_insert_with(Instant::now);
        }
    }

    /// This ends it.
    pub fn failed(&mut self, error: &Error) {
        self.error = Some(error.clone());
    }

    /// It is over: all of its spans leave. `rid` and `room` are what engines knew it by.
    pub fn end(self, rid: &str, room: u64, complete: bool) {
        let now = Instant::now();
        let request = &self.request;
        let known = |mut attributes: Attributes| {
            attributes.push(("r3router.rid", text(rid)));
            if self.prefill.is_some() {
                // 63 bits.
                attributes.push(("r3router.room", room.into()));
            }
            attributes
        };
        let sides =
            [(Source::Prefill, self.prefill.as_ref(), self.r3.0), (Source::Decode, Some(&self.decode), self.r3.1)];
        for (source, leg, r3) in sides {
            let mut more = known(Vec::new());
            if r3 > 0 {
                more.push(("r3router.r3.bytes", r3.into()));
            }
            let error = self.error.as_ref().filter(|e| e.source == source);
            if let Some(span) = leg.and_then(|leg| leg.span(request, self.id, more, error)) {
                request.take(span);
            }
        }
        // What a client ends itself is no error.
        let error = self.error.as_ref().filter(|e| !matches!(e.kind, Kind::Aborted | Kind::ClientGone));
        if let Some((began, ended)) = self.merge {
            let bytes =
                vec![("r3router.r3.prefill.bytes", self.r3.0.into()), ("r3router.r3.decode.bytes", self.r3.1.into())];
            let mut span = request.span("merge", (0, self.id), (began, ended.unwrap_or(now)), bytes);
            span.error = error.filter(|_| ended.is_none()).map(brief);
            request.take(span);
        }
        let result = match &self.error {
            Some(error) => error.kind.code(),
            None if complete => "ok",
            None => "cancelled",
        };
        let mut attributes =
            known(vec![("r3router.attempt", u64::from(self.number).into()), ("r3router.result", result.into())]);
        if error.is_some() {
            attributes.push(("error.type", result.into()));
        }
        let mut span = request.span("attempt", (self.id, 0), (self.began, now), attributes);
        if let Some(at) = self.delivered {
            span.events.push(("delivered", request.at(at)));
        }
        span.error = error.map(brief);
        request.take(span);
    }
}
