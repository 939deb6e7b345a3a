//! One attempt on a bound pair: both legs are built, sent prefill first, and raced. The first that fails ends the attempt.
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use r3router_core::wire::{Bootstrap, Owned, splice};

use crate::admit::Grant;
use crate::attempts::{Mode, WHOLE};
use crate::context::Shared;
use crate::leg::{LegBody, MAX_ERROR, fault_error, first_event_error, judge, says_abort, source, status_error};
use crate::live::{Owner, Signal, Sub};
use crate::merge::{Plan, PrefillPart, Refs, read_prefill};
use crate::metrics::LegResult;
use crate::timer::Timer;
use crate::trace;
use crate::upstream::Call;
use crate::worker::Worker;

/// Prefill replies up to this size are read whole and looked at for an abort; one that ran is longer or says how it ended.
const SMALL_REPLY: u64 = 64 << 10;
/// How long an aborted request may take to end on its engines before the router ends it.
const ABORT_LIMIT: Duration = Duration::from_secs(10);
/// R3 text from which on an engine's emission rate is measured; below, the time is that of one packet.
pub const MEASURED_TEXT: u64 = 1 << 20;

type PrefillResult = Result<Option<PrefillPart>, Error>;

/// Prefill's side of an attempt, wherever it stands.
pub enum Prefill {
    /// There is none: regular mode, or it was taken.
    None,
    /// Its reply is not here as a whole.
    Running(Pin<Box<dyn Future<Output = PrefillResult> + Send>>),
    /// Read to its end. Without a part when nothing has to be merged.
    Done(Option<PrefillPart>),
}

impl std::fmt::Debug for Prefill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Running(_) => "Running",
            Self::Done(_) => "Done",
        })
    }
}

impl Prefill {
    /// Moves it on. An error is its end.
    pub fn poll_error(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        if let Self::Running(running) = self
            && let Poll::Ready(result) = running.as_mut().poll(cx)
        {
            match result {
                Ok(part) => *self = Self::Done(part),
                Err(error) => {
                    *self = Self::None;
                    return Poll::Ready(error);
                }
            }
        }
        Poll::Pending
    }

    /// Whether its reply is still awaited.
    pub fn is_running(&self) -> bool {
        matches!(self, Self::Running(_))
    }
}

/// As the merge takes it.
impl Future for Prefill {
    type Output = Result<PrefillPart, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(error) = self.poll_error(cx) {
            return Poll::Ready(Err(error));
        }
        match &mut *self {
            Self::Running(_) => Poll::Pending,
            Self::Done(part) if part.is_some() => Poll::Ready(part.take().ok_or_else(no_part)),
            _ => Poll::Ready(Err(no_part())),
        }
    }
}

fn no_part() -> Error {
    Error::new(Kind::Internal, Source::Router, "prefill's part of the reply was asked for twice")
}

/// An attempt whose decode reply has begun with 2xx.
#[derive(Debug)]
pub struct Started {
    /// Decode's reply, first piece unread.
    pub decode: LegBody,
    /// Prefill's side.
    pub prefill: Prefill,
    /// The attempt's limits.
    pub timer: Timer,
    /// What has to be merged.
    pub plan: Plan,
    /// Whether prefill's part is read for a merge of whole replies.
    pub merged: bool,
}

/// How a leg's fields are to be set, decided once for both legs.
struct Legs {
    prefill: Option<Call>,
    decode: Call,
    plan: Plan,
}

fn rank_field(worker: &Worker, rank: u16) -> Option<u16> {
    worker.abilities.ranks_known.then_some(rank)
}

/// Whether the pair is sent as routers without admission send it: the baseline.
fn is_plain(shared: &Shared) -> bool {
    !shared.app.settings.admission
}

fn build(shared: &Shared, mode: Mode, rid: &str, grant: &Grant, spans: Option<&trace::Attempt>) -> Legs {
    let Mode { index, whole, .. } = mode;
    let facts = &shared.facts;
    let (decode, decode_rank) = (&grant.decode, grant.binding.decode.rank);
    let call = |role: Role, worker: &Worker, pieces: Arc<[Bytes]>| {
        let mut headers = shared.leg_headers(worker);
        if let Some(spans) = spans {
            spans.mark(role, &mut headers, pieces.iter().map(|p| p.len() as u64).sum());
        }
        Call { method: Method::POST, uri: shared.uri.clone(), headers, pieces }
    };
    let pieces = |owned: &Owned<'_>| -> Arc<[Bytes]> { splice(&shared.body, facts, owned).pieces.into() };
    let (Some(prefill), Some(prefill_rank)) = (&grant.prefill, grant.binding.prefill) else {
        let body: Arc<[Bytes]> = if whole {
            Arc::from([shared.body.clone()])
        } else {
            let routed_dp_rank = rank_field(decode, decode_rank).filter(|_| decode.names.len() > 1);
            pieces(&Owned { sub: index, rid: Some(rid), routed_dp_rank, ..Owned::default() })
        };
        let mut plan = Plan::of(facts, index, None);
        // What one engine answers is whole; only rows that go by reference, or lie on its host, are touched.
        (plan.unsplit, plan.logprobs) = (true, false);
        plan.routed_experts &= !whole;
        plan.indexer_topk &= !whole;
        plan.decode = decode.name(decode_rank);
        references(shared, rid, grant, &mut plan);
        return Legs { prefill: None, decode: call(Role::Regular, decode, body), plan };
    };
    let known = facts.prompt(index).ids.filter(|_| facts.routed_experts);
    let decode_start = known
        .filter(|_| shared.app.settings.rewrites_start_len() && decode.abilities.start_len)
        .map(|ids| ids.max(facts.routed_experts_start));
    let checks_rows = facts.stream && facts.routed_experts && !facts.include_usage;
    let include_usage = checks_rows && shared.route != r3router_core::wire::Route::Generate;
    let bootstrap = Bootstrap { host: &prefill.bootstrap_host, port: prefill.bootstrap_port, room: grant.binding.room };
    let prefill_rank = prefill_rank.rank;
    let plain = is_plain(shared);
    let named = rank_field(prefill, prefill_rank).filter(|_| !plain);
    let owned = Owned { sub: index, rid: Some(rid), bootstrap: Some(bootstrap), ..Owned::default() };
    let for_prefill = Owned {
        routed_dp_rank: named,
        disagg_prefill_dp_rank: named.filter(|_| prefill.abilities.prefill_rank_for_prefill),
        stream: facts.stream.then_some(false),
        ..owned
    };
    let for_decode = Owned {
        routed_dp_rank: rank_field(decode, decode_rank).filter(|_| !plain),
        disagg_prefill_dp_rank: named.filter(|_| decode.abilities.prefill_rank_for_decode),
        routed_experts_start_len: decode_start,
        include_usage,
        ..owned
    };
    let mut plan = Plan::of(facts, index, decode_start);
    references(shared, rid, grant, &mut plan);
    plan.hide_usage = include_usage;
    plan.prefill = prefill.name(prefill_rank);
    plan.decode = decode.name(decode_rank);
    // The head of a stream comes long before its end.
    plan.due = (plan.routed_experts && !plan.by_ref && !facts.stream).then(Arc::default);
    let prefill = call(Role::Prefill, prefill, pieces(&for_prefill));
    Legs { prefill: Some(prefill), decode: call(Role::Decode, decode, pieces(&for_decode)), plan }
}

/// How rows go to the client.
fn references(shared: &Shared, rid: &str, grant: &Grant, plan: &mut Plan) {
    plan.by_ref = shared.by_ref;
    plan.agents = Some(Arc::clone(&shared.app.agents));
    plan.row_items = shared.app.rows.get(&shared.model);
    if shared.by_ref && plan.routed_experts {
        plan.refs = Some(Arc::new(Refs {
            store: shared.app.store.clone(),
            base: Arc::clone(&shared.base),
            host: Arc::clone(&shared.app.host),
            shape: shared.app.shape(),
            rid: Arc::from(rid),
            // Rooms are never drawn twice.
            attempt: grant.binding.room as u32,
        }));
    }
}

/// Sends both legs of a granted pair and waits until decode's reply has begun.
///
/// # Errors
/// The first leg's failure, a limit, or an abort. The caller ends the attempt with [`end`].
pub async fn start(shared: &Arc<Shared>, sub: &Owner, mode: Mode, mut grant: Grant) -> Result<Started, Error> {
    let app = &shared.app;
    let plain = is_plain(shared) && grant.prefill.is_some();
    if plain {
        // Ranks are not chosen: the room, from all rooms, is all that prefill is told.
        grant.binding.room = (rand::random::<u64>() >> 1).max(1);
    }
    let (prefill_worker, decode_worker) = (grant.prefill.clone(), Arc::clone(&grant.decode));
    let ranks = (grant.binding.prefill.map(|p| p.rank), grant.binding.decode.rank);
    let regular = prefill_worker.is_none();
    let legs = sub.begin(grant, |rid, grant, spans| build(shared, mode, rid, grant, spans));
    app.metrics.attempts.fetch_add(1, Ordering::Relaxed);
    let plan = legs.plan;
    let mut merged = plan.merges() || (!regular && mode.joined && !shared.facts.stream);
    let mut prefill = match (prefill_worker, legs.prefill, ranks.0) {
        (Some(worker), Some(call), Some(rank)) => {
            let leg = prefill_leg(Arc::clone(shared), Arc::clone(sub), worker, rank, call, plan.clone(), merged);
            Prefill::Running(Box::pin(leg))
        }
        _ if plan.merges() => Prefill::Done(Some(PrefillPart::default())),
        _ => Prefill::None,
    };
    let mut timer = Timer::new(
        &app.gate,
        if regular || plain { app.settings.request_timeout_secs } else { app.settings.delivery_timeout() },
        shared.deadline(),
        app.settings.request_timeout_secs,
    );
    let role = if regular { Role::Regular } else { Role::Decode };
    let name = decode_worker.name(ranks.1);
    let mut decode = std::pin::pin!(decode_leg(shared, sub, role, decode_worker, name, &legs.decode));
    let mut watch = Watch::default();
    let mut joined = Joined::default();
    let decode = poll_fn(|cx| {
        if let Poll::Ready(error) = watch.poll(cx, shared, sub, &mut timer) {
            return Poll::Ready(Err(error));
        }
        if plain {
            return joined.poll(cx, &mut prefill, decode.as_mut());
        }
        if let Poll::Ready(error) = prefill.poll_error(cx) {
            return Poll::Ready(Err(error));
        }
        // Decode's clock starts with its reservation, so it hears of the request once prefill has all of it.
        if prefill.is_running() && !sub.prefill_sent.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        decode.as_mut().poll(cx)
    })
    .await?;
    if let Some(due) = &plan.due {
        due.tell();
    }
    sub.delivered();
    // Descriptors are small. A large in-line reply of one engine passes as it is.
    merged &= !regular || plan.by_ref || decode.content_length().is_none_or(|n| n <= WHOLE as u64);
    Ok(Started { decode, prefill, timer, plan, merged })
}

/// Both legs sent at once and joined: a leg that fails is not acted on before the other has ended (decode: has begun its reply, or
/// failed), and decode's failure is the one that is told.
#[derive(Default)]
struct Joined {
    prefill: Option<Error>,
    decode: Option<Result<LegBody, Error>>,
}

impl Joined {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        prefill: &mut Prefill,
        decode: Pin<&mut impl Future<Output = Result<LegBody, Error>>>,
    ) -> Poll<Result<LegBody, Error>> {
        if let Poll::Ready(error) = prefill.poll_error(cx) {
            self.prefill = Some(error);
        }
        if self.decode.is_none()
            && let Poll::Ready(result) = decode.poll(cx)
        {
            self.decode = Some(result);
        }
        match (self.decode.take(), self.prefill.take()) {
            (Some(Ok(_)), Some(error)) => Poll::Ready(Err(error)),
            (Some(Ok(body)), None) => Poll::Ready(Ok(body)),
            (Some(Err(error)), _) if !prefill.is_running() => Poll::Ready(Err(error)),
            (decode, lost) => {
                (self.decode, self.prefill) = (decode, lost);
                Poll::Pending
            }
        }
    }
}

/// Ends a failed attempt: the permit goes back, open legs are aborted.
pub fn end(sub: &Sub, error: &Error) {
    let open = if error.kind == Kind::DeliveryTimeout { LegResult::Deadline } else { LegResult::Cancelled };
    sub.spans(|spans| spans.failed(error));
    sub.finish(crate::leg::outcome(error), open);
}

/// What can end a running attempt from outside its legs.
#[derive(Debug, Default)]
pub struct Watch {
    aborted_at: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Watch {
    /// Ready with the reason.
    pub fn poll(&mut self, cx: &mut Context<'_>, shared: &Shared, sub: &Sub, timer: &mut Timer) -> Poll<Error> {
        for signal in sub.poll_signals(cx) {
            let gone = |role: Role| {
                Error::new(Kind::Reset, source(role), "the engine's process was replaced while the request ran on it")
                    .retryable()
            };
            match signal {
                Signal::PrefillGone => return Poll::Ready(gone(Role::Prefill)),
                Signal::DecodeGone => return Poll::Ready(gone(Role::Decode)),
                Signal::Aborted => {
                    // The engines answer an abort themselves, with what they have; they get a while for it.
                    let limit = self.aborted_at.get_or_insert_with(|| Box::pin(tokio::time::sleep(ABORT_LIMIT)));
                    if limit.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(aborted());
                    }
                }
            }
        }
        timer.poll(cx, &shared.app.gate, || sub.is_delivered())
    }
}

/// The error of a request that was aborted by `/abort_request`.
pub fn aborted() -> Error {
    Error::new(Kind::Aborted, Source::Client, "aborted by /abort_request")
}

async fn prefill_leg(
    shared: Arc<Shared>,
    sub: Arc<Sub>,
    worker: Arc<Worker>,
    rank: u16,
    call: Call,
    plan: Plan,
    merged: bool,
) -> PrefillResult {
    let name = worker.name(rank);
    sub.leg_started(Role::Prefill);
    let result = async {
        let sent = worker.pool.send_observed(&call, || sub.prefill_sent.store(true, Ordering::Relaxed)).await;
        let exchange = sent.map_err(|fault| fault_error(Role::Prefill, &name, &fault))?;
        let body = LegBody::new(exchange, Arc::clone(&worker), shared.app.clock);
        let mut body = body.traced(sub.leg_span(Role::Prefill));
        check_status(&sub, Role::Prefill, &name, &mut body).await?;
        let length = body.content_length();
        let part = match length {
            Some(length) if length <= SMALL_REPLY => {
                let whole = collect(&mut body, &name).await?;
                if says_abort(&whole) {
                    // Decode is not told of it by any engine version, so this is the end of the attempt.
                    sub.keep_reply(body.status(), body.headers(), whole);
                    return Err(aborted());
                }
                if merged || plan.merges() {
                    Some(read_prefill(Full::new(whole), Some(length), &plan, &shared.app.arena).await?)
                } else {
                    None
                }
            }
            _ if merged || plan.merges() => Some(read_prefill(&mut body, length, &plan, &shared.app.arena).await?),
            _ => {
                while let Some(piece) = body.piece().await {
                    piece.map_err(|fault| fault_error(Role::Prefill, &name, &fault))?;
                }
                None
            }
        };
        if plan.routed_experts && shared.app.fleet_bytes(body.bytes) >= MEASURED_TEXT {
            shared.app.gate.emitted(worker.id, body.bytes, body.took());
        }
        Ok(part)
    }
    .await;
    match &result {
        Ok(_) => sub.leg_ended(Role::Prefill, LegResult::Ok),
        Err(error) => sub.leg_ended(Role::Prefill, judge(error).0),
    }
    if let Err(error) = &result
        && error.kind == Kind::Connect
    {
        shared.app.suspect(&worker);
    }
    result
}

async fn collect(body: &mut LegBody, name: &str) -> Result<Bytes, Error> {
    body.collect(SMALL_REPLY as usize).await.map_err(|fault| fault_error(Role::Prefill, name, &fault))
}

async fn check_status(sub: &Sub, role: Role, name: &str, body: &mut LegBody) -> Result<(), Error> {
    let status = body.status();
    if status.is_success() {
        return Ok(());
    }
    // A status is an answer, even when its text breaks off.
    let text = body.collect(MAX_ERROR).await.unwrap_or_default();
    let error = status_error(role, name, status, &text);
    sub.keep_reply(status, body.headers(), text);
    Err(error)
}

async fn decode_leg(
    shared: &Arc<Shared>,
    sub: &Arc<Sub>,
    role: Role,
    worker: Arc<Worker>,
    name: Arc<str>,
    call: &Call,
) -> Result<LegBody, Error> {
    sub.leg_started(role);
    let result = async {
        let sent = worker.pool.send(call).await;
        let exchange = sent.map_err(|fault| fault_error(role, &name, &fault))?;
        let mut body = LegBody::new(exchange, Arc::clone(&worker), shared.app.clock).traced(sub.leg_span(role));
        check_status(sub, role, &name, &mut body).await?;
        // Headers of a stream come before anything is known; the first piece is what counts.
        match body.piece().await {
            Some(Ok(piece)) => {
                if shared.facts.stream
                    && let Some(error) = first_event_error(role, &name, &piece)
                {
                    return Err(error);
                }
                body.unread(piece);
            }
            Some(Err(fault)) => return Err(fault_error(role, &name, &fault)),
            None => {}
        }
        Ok(body)
    }
    .await;
    if let Err(error) = &result {
        sub.leg_ended(role, judge(error).0);
        if error.kind == Kind::Connect {
            shared.app.suspect(&worker);
        }
    }
    result
}

/// What is left of an attempt when decode's reply has ended before prefill's: prefill's is awaited for a moment, then given up.
pub async fn linger(sub: Owner, mut prefill: Prefill, output_tokens: u32) {
    const MOMENT: Duration = Duration::from_secs(5);
    let began = Instant::now();
    let done = tokio::time::timeout(
        MOMENT,
        poll_fn(|cx| match prefill.poll_error(cx) {
            Poll::Ready(error) => Poll::Ready(Some(error)),
            Poll::Pending if prefill.is_running() => Poll::Pending,
            Poll::Pending => Poll::Ready(None),
        }),
    )
    .await;
    if done.is_err() {
        tracing::warn!(rid = sub.trace().rid, waited = ?began.elapsed(), "prefill has not answered although decode has ended");
    }
    drop(prefill);
    sub.finish(r3router_core::admission::Outcome::Completed { output_tokens }, LegResult::Cancelled);
}
