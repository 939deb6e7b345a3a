//! A sub-request from the queue to a reply that can be sent: attempts within the budget, each on a new pair with a new room and new
//! ids, only while no byte has reached the client.
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use r3router_core::admission::{Outcome, Request};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::{RankId, Role};
use r3router_core::wire::{PromptKind, prefix_hashes};
use tokio::sync::OwnedSemaphorePermit;

use crate::admit::Grant;
use crate::app::App;
use crate::context::{Count, Shared};
use crate::dispatch::{MEASURED_TEXT, Prefill, Started, Watch, aborted, end, linger, start};
use crate::leg::{LegBody, fault_error, judge};
use crate::live::{Owner, Signal};
use crate::merge::{Merged, merge_json};
use crate::metrics::LegResult;
use crate::relay::{Relay, completion_tokens, note, note_account};
use crate::trace::Wait;

/// Replies up to this size are read whole before the first byte is sent, so that a broken one can be tried again.
pub const WHOLE: usize = 256 << 10;

/// A reply that can be sent.
#[derive(Debug)]
pub enum Ready {
    /// Complete.
    Whole(Bytes),
    /// Complete and checked, read from the arena as it is sent.
    Merged(Merged),
    /// Begun.
    Stream(Box<Relay>),
}

/// Status, headers and reply of a sub-request.
#[derive(Debug)]
pub struct Answer {
    /// Decode's status.
    pub status: StatusCode,
    /// Decode's end-to-end headers.
    pub headers: HeaderMap,
    /// The reply.
    pub ready: Ready,
}

/// How a sub-request is to be served.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// Which sub-request of the client's.
    pub index: usize,
    /// The client's own bytes are sent (regular mode, batches).
    pub whole: bool,
    /// Its reply will be joined with others, so it is wanted in the form that the join takes.
    pub joined: bool,
}

/// Attempts beyond the first that the whole router may still make: a share of its requests, so that a failing fleet is not hammered.
#[derive(Debug)]
pub struct RetryBudget(AtomicI64);

impl RetryBudget {
    /// Retries that may come at once.
    const BURST: i64 = 100;
    /// Thousandths of a retry that every request earns.
    const SHARE: i64 = 200;

    fn earn(&self) {
        if self.0.load(Ordering::Relaxed) < Self::BURST * 1000 {
            self.0.fetch_add(Self::SHARE, Ordering::Relaxed);
        }
    }

    fn spend(&self) -> bool {
        if self.0.fetch_sub(1000, Ordering::Relaxed) >= 1000 {
            return true;
        }
        self.0.fetch_add(1000, Ordering::Relaxed);
        false
    }
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self(AtomicI64::new(Self::BURST * 1000))
    }
}

/// What the admission is told of a sub-request.
pub fn admission_request(shared: &Shared, mode: Mode) -> Request {
    let mut request = sized(shared, mode);
    let by_prefix = shared.app.settings.by_prefix() && !mode.whole;
    let prefix = if by_prefix { prefix_hashes(&shared.body, &shared.facts, mode.index) } else { Vec::new() };
    if !prefix.is_empty() {
        request.prefix = prefix.into();
    }
    request
}

/// The same without the prompt's prefix: all that can make a request too large.
pub fn sized(shared: &Shared, mode: Mode) -> Request {
    let facts = &shared.facts;
    let app = &shared.app;
    let (mut prompt_tokens, mut max_new) = (0u32, Some(0u32));
    let subs = if mode.whole { 0..facts.subs() } else { mode.index..mode.index + 1 };
    let mut r3 = None;
    for sub in subs {
        let prompt = facts.prompt(sub);
        let tokens = prompt.ids.unwrap_or_else(|| estimate(prompt.kind, prompt.span.end - prompt.span.start));
        prompt_tokens = prompt_tokens.saturating_add(tokens);
        max_new = max_new.zip(prompt.max_new_tokens).map(|(a, b)| a.saturating_add(b));
        if facts.routed_experts && !mode.whole {
            let rewritten = app.settings.rewrites_start_len() && prompt.ids.is_some();
            let decode_start =
                if rewritten { tokens.max(facts.routed_experts_start) } else { facts.routed_experts_start };
            let kept = shared.by_ref.then(|| app.shape().width());
            let mut need = app.rows.need(&shared.model, facts, prompt, tokens, decode_start, kept);
            need.prefill_text = app.fleet_bytes(need.prefill_text);
            need.decode_text = app.fleet_bytes(need.decode_text);
            r3 = Some(need);
        }
    }
    let waits = app.settings.queue_timeout_secs.min(app.settings.request_timeout_secs);
    Request {
        prompt_tokens,
        max_new_tokens: max_new,
        key: shared.key,
        prefix: empty(),
        deadline: app.clock.at(shared.arrived + waits),
        body_bytes: shared.body.len() as u64 / facts.subs().max(1) as u64,
        r3,
        avoid: Vec::new(),
        retry: false,
        targets: shared.targets,
    }
}

/// Engines that may be lost while they have one request. What ends two in a row may be the request itself (prefill of SGLang 0.5.12 dies
/// of one for top logprobs), and retries would end the whole fleet.
const MOST_LOST: u32 = 2;

/// One empty list for all: most requests have no prefix worth a hash.
fn empty() -> Arc<[u64]> {
    static EMPTY: std::sync::OnceLock<Arc<[u64]>> = std::sync::OnceLock::new();
    Arc::clone(EMPTY.get_or_init(|| Arc::from([])))
}

/// Prompt tokens of `bytes` bytes of JSON: four bytes a token, as in English text. The engine's own reports correct the ledger.
fn estimate(kind: PromptKind, bytes: usize) -> u32 {
    match kind {
        PromptKind::Absent => 1,
        _ => u32::try_from(bytes / 4).unwrap_or(u32::MAX).max(1),
    }
}

/// Serves one sub-request up to a reply that can be sent. The owner comes back inside of the reply when it is a stream.
///
/// # Errors
/// What the client is to be told.
pub async fn serve(shared: &Arc<Shared>, sub: Owner, mode: Mode, count: &Arc<Count>) -> Result<Answer, Refusal> {
    let app = &shared.app;
    app.retries.earn();
    let mut request = admission_request(shared, mode);
    let mut attempts_left = app.settings.attempts();
    let mut pause = app.settings.retry_initial_backoff_ms;
    let mut last: Option<Error> = None;
    let (mut lost, mut number) = (0, 1);
    let mut waiting = Wait::begin(shared.trace.as_ref(), number);
    let may = match turn(app, &sub).await {
        Ok(()) => place(app, &sub).await,
        Err(error) => Err(error),
    };
    match may {
        Ok(Some(slot)) => sub.hold(slot),
        Ok(None) => {}
        Err(error) => {
            waiting.refused(&error);
            return Err(refusal(&sub, count, error));
        }
    }
    loop {
        let queued = Instant::now();
        let grant = match acquire(shared, &sub, request.clone()).await {
            Ok(grant) => grant,
            Err(error) => {
                waiting.refused(&error);
                return Err(refusal(&sub, count, with_cause(error, last)));
            }
        };
        waiting.bound();
        let wait = queued.elapsed();
        app.metrics.wait.observe(wait);
        count.dispatched(wait);
        count.follow(&sub);
        attempts_left -= 1;
        let mut error = match Box::pin(attempt(shared, &sub, mode, grant)).await {
            Ok(Step::Whole(answer, prefill)) => {
                let tokens = answer_tokens(&answer.ready);
                note(count, &sub, tokens);
                complete(shared, sub, prefill, tokens.unwrap_or(0));
                return Ok(answer);
            }
            Ok(Step::Begun(mut started)) => {
                let length = started.decode.content_length().filter(|_| !shared.facts.stream);
                let (status, headers) = take_head(&mut started.decode);
                let relay = Relay::new(*started, length, Arc::clone(shared), sub, Arc::clone(count));
                return Ok(Answer { status, headers, ready: Ready::Stream(Box::new(relay)) });
            }
            // Engines end an aborted transfer with a 500, which 0.5.12 words like any other failure: it is the abort, and no fault of theirs.
            Err(error) if error.kind == Kind::EngineFailed && sub.is_aborted() => aborted(),
            Err(error) => error,
        };
        let (reason, _) = judge(&error);
        let failed_on = match error.source {
            Source::Prefill => sub.rank(Role::Prefill),
            _ => sub.rank(Role::Decode),
        };
        end(&sub, &error);
        lost += u32::from(reason == LegResult::Reset);
        if lost == MOST_LOST {
            attempts_left = 0;
            error.message = format!(
                "{}; {MOST_LOST} engines were lost with this request, which is given to no third",
                error.message
            )
            .into();
        }
        // Slots that ran out are worth one look at another rank, no more.
        if reason == LegResult::Mamba {
            attempts_left = attempts_left.min(1);
        }
        let late = Instant::now() + pause >= shared.deadline();
        if !error.retryable
            || attempts_left == 0
            || late
            || sub.is_aborted()
            || app.drain.started()
            || !app.retries.spend()
        {
            return Err(refusal(&sub, count, error));
        }
        app.metrics.retries.inc(reason as usize);
        tracing::debug!(rid = sub.trace().rid, %error, "trying again on another pair");
        avoid(&mut request, failed_on);
        if reason != LegResult::Connect {
            tokio::time::sleep(jittered(pause, app.settings.retry_jitter_factor)).await;
            pause = pause.mul_f64(app.settings.retry_backoff_multiplier).min(app.settings.retry_max_backoff_ms);
        }
        last = Some(error);
        number += 1;
        waiting = Wait::begin(shared.trace.as_ref(), number);
    }
}

/// An error with the engine's own reply, when it was one.
#[derive(Debug)]
pub struct Refusal {
    /// What went wrong.
    pub error: Error,
    /// The engine's reply as it was written.
    pub kept: Option<crate::live::Kept>,
}

fn refusal(sub: &Owner, count: &Count, error: Error) -> Refusal {
    note(count, sub, None);
    let engine = matches!(error.kind, Kind::EngineRejected | Kind::EngineFailed | Kind::Aborted);
    Refusal { kept: sub.take_reply().filter(|_| engine), error }
}

/// A retry that found no pair says what the attempt before it met.
fn with_cause(mut error: Error, last: Option<Error>) -> Error {
    if let Some(last) = last {
        error.message = format!("{}; the attempt before failed: {last}", error.message).into();
    }
    error
}

fn avoid(request: &mut Request, rank: Option<RankId>) {
    request.retry = true;
    if let Some(rank) = rank
        && !request.avoid.contains(&rank)
    {
        request.avoid.push(rank);
    }
}

fn jittered(pause: Duration, factor: f64) -> Duration {
    pause.mul_f64((1.0 + factor * (rand::random::<f64>() * 2.0 - 1.0)).max(0.0))
}

/// The request's turn under `--rate-limit-tokens-per-second`, when that is set. It leaves the line when it is aborted.
async fn turn(app: &App, sub: &Owner) -> Result<(), Error> {
    let Some(pace) = &app.pace else { return Ok(()) };
    let most = app.settings.queue_timeout_secs;
    let wait = pace.take(Instant::now(), most).map_err(|wait| {
        Error::new(Kind::QueueFull, Source::Router, "no turn under --rate-limit-tokens-per-second in time")
            .with_limit(most.as_secs_f64(), wait.as_secs_f64())
            .advise("send fewer in a second, or raise that limit or --queue-timeout-secs, the longest wait for a turn")
            .retry_after(wait)
    })?;
    if wait.is_zero() {
        return Ok(());
    }
    let mut waiting = pin!(tokio::time::sleep(wait));
    poll_fn(|cx| {
        if sub.poll_signals(cx).any(|s| s == Signal::Aborted) {
            return Poll::Ready(Err(aborted()));
        }
        waiting.as_mut().poll(cx).map(Ok)
    })
    .await
}

/// A place under `--max-concurrent-requests`, when that is set. The request leaves the line when it is aborted.
async fn place(app: &Arc<App>, sub: &Owner) -> Result<Option<OwnedSemaphorePermit>, Error> {
    let Some(slots) = &app.slots else { return Ok(None) };
    if let Ok(permit) = Arc::clone(slots).try_acquire_owned() {
        return Ok(Some(permit));
    }
    let _counted = Placing::new(app);
    let waits = app.settings.queue_timeout_secs;
    let mut waiting = pin!(tokio::time::timeout(waits, Arc::clone(slots).acquire_owned()));
    poll_fn(|cx| {
        if sub.poll_signals(cx).any(|s| s == Signal::Aborted) {
            return Poll::Ready(Err(aborted()));
        }
        waiting.as_mut().poll(cx).map(|slot| match slot {
            Ok(permit) => Ok(permit.ok()),
            Err(_) => {
                Err(Error::new(Kind::QueueTimeout, Source::Router, "no place under --max-concurrent-requests in time")
                    .with_limit(waits.as_secs_f64(), waits.as_secs_f64())
                    .advise(
                        "send fewer at once, or raise that limit or --queue-timeout-secs, the longest wait for a place",
                    )
                    .retry_after(waits))
            }
        })
    })
    .await
}

/// Counts a request that waits for a place.
struct Placing<'a>(&'a App);

impl<'a> Placing<'a> {
    fn new(app: &'a App) -> Self {
        app.metrics.placing.fetch_add(1, Ordering::Relaxed);
        Self(app)
    }
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        self.0.metrics.placing.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits for a pair; leaves the queue when the request is aborted.
async fn acquire(shared: &Arc<Shared>, sub: &Owner, request: Request) -> Result<Grant, Error> {
    let mut waiting = pin!(shared.app.gate.acquire(request));
    poll_fn(|cx| {
        if sub.poll_signals(cx).any(|s| s == Signal::Aborted) {
            return Poll::Ready(Err(aborted()));
        }
        waiting.as_mut().poll(cx)
    })
    .await
}

/// How far an attempt has come when it is good.
enum Step {
    /// Decode's reply is here as a whole; prefill's may still be under way when nothing of it is merged.
    Whole(Answer, Prefill),
    /// Decode's reply has begun.
    Begun(Box<Started>),
}

async fn attempt(shared: &Arc<Shared>, sub: &Owner, mode: Mode, grant: Grant) -> Result<Step, Error> {
    if shared.facts.routed_experts {
        check_r3(&grant)?;
    }
    let mut started = start(shared, sub, mode, grant).await?;
    if shared.facts.stream {
        return Ok(Step::Begun(Box::new(started)));
    }
    if started.merged {
        return merged(shared, sub, started).await;
    }
    // Replies of a known great length are not held back: they stream with what has come.
    if started.decode.content_length().is_some_and(|n| n > WHOLE as u64) {
        return Ok(Step::Begun(Box::new(started)));
    }
    let mut held: Vec<Bytes> = Vec::new();
    let mut size = 0;
    let mut watch = Watch::default();
    loop {
        let Started { decode, prefill, timer, plan, .. } = &mut started;
        let piece = poll_fn(|cx| {
            if let Poll::Ready(error) = watch.poll(cx, shared, sub, timer) {
                return Poll::Ready(Err(error));
            }
            // Decode has answered: prefill's end is only accounted.
            let _ = prefill.poll_error(cx);
            decode.poll_piece(cx).map(|piece| match piece {
                Some(Err(fault)) => Err(fault_error(Role::Decode, &plan.decode, &fault)),
                Some(Ok(piece)) => Ok(Some(piece)),
                None => Ok(None),
            })
        })
        .await?;
        let Some(piece) = piece else { break };
        size += piece.len();
        held.push(piece);
        if size > WHOLE {
            started.decode.unread(concat(held));
            return Ok(Step::Begun(Box::new(started)));
        }
    }
    let body = concat(held);
    let (status, headers) = take_head(&mut started.decode);
    Ok(Step::Whole(Answer { status, headers, ready: Ready::Whole(body) }, started.prefill))
}

async fn merged(shared: &Arc<Shared>, sub: &Owner, started: Started) -> Result<Step, Error> {
    let Started { mut decode, prefill, mut timer, plan, .. } = started;
    let length = decode.content_length();
    let (status, headers) = take_head(&mut decode);
    let arena = &shared.app.arena;
    let mut watch = Watch::default();
    sub.spans(crate::trace::Attempt::merging);
    let merged = {
        let mut merging = pin!(async {
            let merged = merge_json(&mut decode, length, prefill, &plan, arena).await?;
            match &shared.app.sink {
                Some(sink) if shared.sink => merged.sunk(sink).await,
                _ => Ok(merged),
            }
        });
        poll_fn(|cx| {
            if let Poll::Ready(error) = watch.poll(cx, shared, sub, &mut timer) {
                return Poll::Ready(Err(error));
            }
            merging.as_mut().poll(cx)
        })
        .await?
    };
    if shared.app.fleet_bytes(merged.account.r3_decode) >= MEASURED_TEXT {
        shared.app.gate.emitted(decode.worker().id, merged.account.r3_decode, decode.took());
    }
    note_account(shared, &merged.account);
    sub.spans(|spans| spans.merged(merged.account.r3_prefill, merged.account.r3_decode, true));
    Ok(Step::Whole(Answer { status, headers, ready: Ready::Merged(merged) }, Prefill::None))
}

/// Ends a complete attempt. When prefill's reply is still under way, its end is awaited apart from the client.
fn complete(shared: &Shared, sub: Owner, prefill: Prefill, output_tokens: u32) {
    if prefill.is_running() {
        sub.leg_ended(Role::Decode, LegResult::Ok);
        shared.app.runtime.spawn(linger(sub, prefill, output_tokens));
    } else {
        sub.finish(Outcome::Completed { output_tokens }, LegResult::Ok);
    }
}

/// Engines that are known not to give R3 are not asked for it.
fn check_r3(grant: &Grant) -> Result<(), Error> {
    let sides = [(Source::Prefill, grant.prefill.as_ref()), (Source::Decode, Some(&grant.decode))];
    for (source, worker) in sides {
        if let Some(worker) = worker
            && worker.abilities.routed_experts == Some(false)
        {
            return Err(Error::new(Kind::R3Unsupported, source, "the engine does not return routed experts")
                .at_worker(&*worker.url)
                .advise("start it with --enable-return-routed-experts and the Python frontend"));
        }
    }
    Ok(())
}

fn concat(mut pieces: Vec<Bytes>) -> Bytes {
    match pieces.len() {
        0 => Bytes::new(),
        1 => pieces.pop().unwrap_or_default(),
        _ => pieces.concat().into(),
    }
}

fn answer_tokens(ready: &Ready) -> Option<u32> {
    match ready {
        Ready::Whole(body) => completion_tokens(body),
        Ready::Merged(merged) => merged.account.completion_tokens,
        Ready::Stream(_) => None,
    }
}

/// Status and end-to-end headers of a reply. Length and framing are made anew.
fn take_head(body: &mut LegBody) -> (StatusCode, HeaderMap) {
    let status = body.status();
    let mut headers = std::mem::take(body.headers_mut());
    strip_hop_by_hop(&mut headers);
    (status, headers)
}

/// Removes what belongs to one connection, and the length.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if let Some(named) = headers.remove(header::CONNECTION)
        && let Ok(named) = named.to_str()
    {
        for name in named.split(',').map(str::trim) {
            if !name.eq_ignore_ascii_case("close") && !name.eq_ignore_ascii_case("keep-alive") {
                headers.remove(name);
            }
        }
    }
    for name in [
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::TE,
        header::TRAILER,
        header::UPGRADE,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
    ] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
}

#[cfg(test)]
mod tests {
    use super::{RetryBudget, strip_hop_by_hop};
    use http::HeaderMap;

    #[test]
    fn headers_of_one_connection_are_dropped_and_others_kept() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Hop"),
            ("keep-alive", "timeout=5"),
            ("x-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("content-length", "61"),
            ("content-type", "application/json"),
            ("x-engine", "a"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(http::HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-type", "x-engine"]);
    }

    #[test]
    fn retries_are_a_burst_and_then_a_fifth_of_the_requests() {
        let budget = RetryBudget::default();
        assert_eq!((0..1000).filter(|_| budget.spend()).count(), 100);
        for _ in 0..50 {
            budget.earn();
        }
        assert_eq!((0..1000).filter(|_| budget.spend()).count(), 10);
    }
}
