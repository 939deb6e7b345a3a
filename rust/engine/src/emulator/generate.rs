//! Generate requests: from a body to the model, and from the model's effects to a reply.
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{Response, StatusCode, header};
use r3router_core::r3::Dtype;
use r3router_core::r3::descriptor::{Descriptor, ROWS_AT};
use r3router_core::time::Moment;
use r3router_core::topology::Role;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::agent::crc32_of;
use super::body::{EngineBody, OnDrop, Piece};
use super::clock::unix_seconds;
use super::engine::Engine;
use super::openai;
use super::pattern::{Rows, mix};
use super::reply::{Answer, Payload, Stamps, Voice, generate_chunk, generate_reply};
use super::request::{Api, Job, Sub};
use crate::model::{Ask, Bootstrap, Effect, Event, Finish, Key, Reply, Times, Version};

/// Reply of a handler; `None` resets the connection.
pub(crate) type Handled = Option<Response<EngineBody>>;

pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<EngineBody> {
    with_type(status, "application/json", body)
}

pub(crate) fn with_type(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<EngineBody> {
    let mut response = Response::new(EngineBody::bytes(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

fn reply_of(pieces: Vec<Piece>) -> Response<EngineBody> {
    let mut response = Response::new(EngineBody::pieces(pieces));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// SGLang's flat error object: HTTP exceptions of every route, and all errors of the OpenAI routes.
pub(crate) fn error_object(status: u16, kind: &str, message: &str) -> Response<EngineBody> {
    let body = serde_json::json!({"object": "error", "message": message, "type": kind, "param": null, "code": status});
    json(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), body.to_string())
}

/// A request that cannot be run: 400, in the form of its route.
fn refused(api: Api, message: &str) -> Response<EngineBody> {
    match api {
        Api::Generate => json(StatusCode::BAD_REQUEST, serde_json::json!({"error": {"message": message}}).to_string()),
        Api::Chat | Api::Completions => error_object(400, "BadRequest", message),
    }
}

/// A generation that the engine ended with an error status, in the form of a whole reply.
fn failed(api: Api, status: u16, message: &str) -> Response<EngineBody> {
    if status == 400 { refused(api, message) } else { error_object(status, &status.to_string(), message) }
}

/// The error event of a stream, for what the front end itself refuses.
fn refused_event(version: Version, api: Api, message: &str) -> Vec<u8> {
    let value = match (api, version) {
        (Api::Generate, Version::V0_5_12) => serde_json::json!({"error": {"message": message}}),
        (Api::Generate, Version::V0_5_23) => serde_json::json!({
            "error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": false}
        }),
        _ => error_event(400, "BadRequestError", message),
    };
    format!("data: {value}\n\n").into_bytes()
}

fn error_event(code: u16, kind: &str, message: &str) -> serde_json::Value {
    serde_json::json!({"error": {"object": "error", "message": message, "type": kind, "param": null, "code": code}})
}

fn event_stream(body: EngineBody) -> Response<EngineBody> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}

/// Checks that the front end makes before anything reaches a scheduler.
fn check(engine: &Engine, job: &Job) -> Result<(), String> {
    let ranks = i64::from(engine.model.ranks);
    if let Some(rank) = job.rank
        && !(ranks <= 1 && rank == 0)
        && !(0..ranks).contains(&rank)
    {
        return Err(format!("routed_dp_rank={rank} out of range [0, {ranks})"));
    }
    if job.routed_experts {
        if job.start_len < 0 {
            return Err(format!(
                "recv_req.routed_experts_start_len={} is lower than 0. Please use a non-negative routed_experts_start_len.",
                job.start_len
            ));
        }
        for sub in &job.subs {
            if job.start_len > i64::from(sub.prompt_tokens) {
                return Err(format!(
                    "recv_req.routed_experts_start_len={} is higher than the number of input tokens \
                     len(req.origin_input_ids)={}. Please use a smaller routed_experts_start_len.",
                    job.start_len, sub.prompt_tokens
                ));
            }
        }
    }
    Ok(())
}

/// Runs one body.
pub(crate) async fn handle(engine: Arc<Engine>, api: Api, body: Bytes) -> Handled {
    let body_bytes = body.len() as u64;
    let job = match Job::parse(api, &body) {
        Ok(job) => job,
        // What is not JSON, or has a wrong type, fails in the web framework, before the route: one form for all.
        Err(message) if message.starts_with("body:") => return Some(error_object(400, "Bad Request", &message)),
        Err(message) => return Some(refused(api, &message)),
    };
    drop(body);
    if let Err(message) = check(&engine, &job) {
        return Some(if job.stream && api == Api::Generate {
            let mut event = refused_event(engine.model.version, api, &message);
            event.extend_from_slice(b"data: [DONE]\n\n");
            event_stream(EngineBody::bytes(event))
        } else {
            refused(api, &message)
        });
    }
    let run = Run::start(engine, job, body_bytes);
    if run.job.stream { run.stream().await } else { run.whole().await }
}

/// A body that the model works on.
struct Run {
    engine: Arc<Engine>,
    job: Arc<Job>,
    effects: UnboundedReceiver<(usize, Effect)>,
    guard: OnDrop,
    /// When the body was here, seconds since 1970.
    began: f64,
}

/// Rooms end on the engine when their generation does, whichever way.
struct Room {
    engine: Arc<Engine>,
    room: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.engine.drive.tally(self.engine.id, |tally| tally.room_ends(self.room));
    }
}

impl Run {
    fn start(engine: Arc<Engine>, mut job: Job, body_bytes: u64) -> Self {
        let began = unix_seconds();
        let (sender, effects) = unbounded_channel();
        let mut keys = Vec::with_capacity(job.subs.len());
        let mut rooms = Vec::new();
        for at in 0..job.subs.len() {
            let sub = &job.subs[at];
            let fresh = engine.drive.tally(engine.id, |tally| {
                tally.requests += 1;
                tally.arrivals.entry(sub.nonce).or_insert_with(Instant::now);
                sub.room.is_none_or(|room| tally.room_opens(room))
            });
            if !fresh {
                // A real engine mixes the two up; what it notices is the room number in the metadata row.
                let _gone = sender.send((at, duplicate_room(&engine, sub)));
                continue;
            }
            if let Some(room) = sub.room {
                rooms.push(Room { engine: engine.clone(), room });
            }
            let ask = ask(&engine, &job, sub, body_bytes / job.subs.len() as u64);
            keys.push(engine.drive.open(engine.id, at, &sender, |key| Event::Generate { key, ask }));
        }
        if !(job.logprobs || job.echo) {
            // The ids have done their work; thousands of waiting requests should not keep them.
            job.subs.iter_mut().for_each(|sub| sub.ids = Vec::new());
        }
        let guard = left(engine.clone(), keys, rooms);
        Self { engine, job: Arc::new(job), effects, guard, began }
    }

    /// Waits for all generations and answers once.
    async fn whole(mut self) -> Handled {
        let mut answers: Vec<Option<Answer>> = vec![None; self.job.subs.len()];
        while answers.iter().any(Option::is_none) {
            let (at, effect) = self.effects.recv().await?;
            match effect {
                Effect::Done { reply, .. } => {
                    if let Finish::Abort { status, message } = &finish_of(&self.job.subs[at], &reply.finish)
                        && *status != 200
                    {
                        // The others go on in the engine until the guard tells it that nobody waits.
                        if self.job.subs.len() == 1 {
                            self.guard.defuse();
                        }
                        return Some(failed(self.job.api, *status, message));
                    }
                    answers[at] = Some(answer(&self.engine, &self.job, at, &reply, self.began));
                }
                Effect::Reset { .. } => {
                    self.guard.defuse();
                    self.engine.died();
                    return None;
                }
                Effect::Answer { status, .. } => {
                    self.guard.defuse();
                    return Some(failed(self.job.api, status, "refused by the model"));
                }
                Effect::Opened { .. } | Effect::Chunk { .. } => {}
            }
        }
        self.guard.defuse();
        let answers: Vec<Answer> = answers.into_iter().flatten().collect();
        let voice = self.engine.voice();
        let pieces = match self.job.api {
            Api::Generate => generate_reply(&voice, &self.job, &answers),
            Api::Chat | Api::Completions => openai::reply(&voice, &self.job, &answers),
        };
        Some(reply_of(pieces))
    }

    /// Opens the stream when the engine does, and feeds it from a task of its own.
    async fn stream(mut self) -> Handled {
        let first = self.effects.recv().await?;
        if let Effect::Reset { .. } = first.1 {
            self.guard.defuse();
            self.engine.died();
            return None;
        }
        let (sender, receiver) = unbounded_channel();
        let Self { engine, job, effects, guard, began } = self;
        let body = EngineBody::stream(receiver).guarded(guard);
        tokio::spawn(feed(engine, job, effects, first, sender, began));
        Some(event_stream(body))
    }
}

/// Fires when nobody reads the reply any more: the engine is told as its front end would notice.
fn left(engine: Arc<Engine>, keys: Vec<Key>, rooms: Vec<Room>) -> OnDrop {
    let rooms_end = rooms;
    OnDrop::new(move || {
        let _rooms_end_here = rooms_end;
        engine.drive.tally(engine.id, |tally| tally.disconnects += 1);
        for key in keys {
            engine.drive.tell(engine.id, Event::Disconnect { key });
        }
    })
}

async fn feed(
    engine: Arc<Engine>,
    job: Arc<Job>,
    mut effects: UnboundedReceiver<(usize, Effect)>,
    first: (usize, Effect),
    out: UnboundedSender<Piece>,
    began: f64,
) {
    let voice = engine.voice();
    let mut sent = vec![0_u32; job.subs.len()];
    let mut first_events: Vec<Option<f64>> = vec![None; job.subs.len()];
    let mut answers: Vec<Option<Answer>> = vec![None; job.subs.len()];
    let mut opened = vec![false; job.subs.len()];
    let mut next = Some(first);
    // A body that is gone drops the receiver; the guard in it has told the engine.
    while let Some((at, effect)) = next {
        let (mut answer, ended) = match effect {
            Effect::Opened { .. } | Effect::Answer { .. } => {
                next = effects.recv().await;
                continue;
            }
            Effect::Reset { .. } => {
                let _gone = out.send(Piece::Break);
                engine.died();
                return;
            }
            Effect::Chunk { tokens, .. } => (partial(&engine, &job, at, tokens, began), false),
            Effect::Done { reply, .. } => (answer(&engine, &job, at, &reply, began), true),
        };
        if ended
            && job.api != Api::Generate
            && let Some(Finish::Abort { status, message }) = &answer.finish
            && *status != 200
        {
            let kind = StatusCode::from_u16(*status).ok().and_then(|s| s.canonical_reason()).unwrap_or("ERROR");
            let event = error_event(*status, &kind.to_uppercase().replace(' ', "_"), message);
            let _gone = out.send(format!("data: {event}\n\ndata: [DONE]\n\n").into_bytes().into());
            return;
        }
        if ended || answer.tokens > sent[at] {
            answer.stamps.is_first_event = first_events[at].is_none();
            answer.stamps.first_event = Some(*first_events[at].get_or_insert_with(unix_seconds));
            for piece in events(&voice, &job, at, &answer, sent[at], &mut opened[at]) {
                if out.send(piece).is_err() {
                    return;
                }
            }
            sent[at] = answer.tokens;
        }
        if ended {
            answers[at] = Some(answer);
            if answers.iter().all(Option::is_some) {
                break;
            }
        }
        next = effects.recv().await;
    }
    let answers: Vec<Answer> = answers.into_iter().flatten().collect();
    let mut tail = if job.api == Api::Generate { Vec::new() } else { openai::tail_chunks(&voice, &job, &answers) };
    tail.push(Piece::Bytes(Bytes::from_static(b"data: [DONE]\n\n")));
    for piece in tail {
        let _gone = out.send(piece);
    }
}

/// The events of a stream that one step of one generation makes.
fn events(voice: &Voice, job: &Job, at: usize, answer: &Answer, sent: u32, opened: &mut bool) -> Vec<Piece> {
    match job.api {
        Api::Generate => generate_chunk(voice, job, at, answer),
        Api::Chat => {
            let mut pieces = Vec::new();
            if !std::mem::replace(opened, true) {
                pieces = openai::role_chunk(voice, job, at);
            }
            if answer.tokens > sent {
                pieces.extend(openai::delta_chunk(voice, job, at, answer, sent));
            }
            pieces
        }
        Api::Completions => openai::delta_chunk(voice, job, at, answer, sent),
    }
}

fn duplicate_room(engine: &Engine, sub: &Sub) -> Effect {
    let message = format!(
        "Metadata corruption detected - bootstrap_room mismatch. rid='{}' bootstrap_room={}: another live request has it",
        sub.rid,
        sub.room.unwrap_or(0)
    );
    let reply = Reply {
        finish: Finish::Abort { status: 500, message },
        rank: 0,
        prompt_tokens: engine.scale.model(sub.prompt_tokens),
        cached_tokens: 0,
        output_tokens: 0,
        r3: None,
        times: Times::default(),
    };
    Effect::Done { key: Key(0), reply: Box::new(reply) }
}

/// What the model is asked for: the wire's numbers, scaled up.
fn ask(engine: &Engine, job: &Job, sub: &Sub, body_bytes: u64) -> Ask {
    let scale = engine.scale;
    Ask {
        rid: sub.rid.as_str().into(),
        prompt_tokens: scale.model(sub.prompt_tokens),
        prefix: prefix(engine, &sub.ids),
        output_tokens: scale.model(sub.max_new_tokens),
        max_new_tokens: Some(scale.model(sub.max_new_tokens)),
        stream: job.stream,
        r3_start: job.routed_experts.then(|| scale.model(u32::try_from(job.start_len).unwrap_or(0))),
        body_bytes: scale.model_bytes(body_bytes),
        bootstrap: sub.room.map(|room| Bootstrap {
            prefill: sub.bootstrap.as_ref().and_then(|(host, port)| engine.shared.prefill_at(host, *port)),
            room,
        }),
        routed_dp_rank: job.rank.and_then(|rank| u16::try_from(rank).ok()),
        prefill_dp_rank: job.prefill_rank.and_then(|rank| u16::try_from(rank).ok()),
    }
}

/// Chained hashes of the prompt's blocks. Blocks are the model's; on the wire they are smaller by the scale.
fn prefix(engine: &Engine, ids: &[u32]) -> Arc<[u64]> {
    if !engine.model.prefix_cache || engine.model.role == Role::Decode || ids.is_empty() {
        return Arc::from([]);
    }
    let block = f64::from(engine.model.prefix_block.max(1)) / engine.scale.factor();
    let mut hash = 0xB10C;
    let mut out = Vec::new();
    let mut from = 0;
    for i in 1_u32.. {
        let to = (f64::from(i) * block).round() as usize;
        if to > ids.len() {
            break;
        }
        hash = ids[from..to].iter().fold(hash, |h, id| mix(h ^ u64::from(*id)));
        out.push(mix(hash ^ u64::from(i)));
        from = to;
    }
    out.into()
}

/// The rank as replies name it.
fn named_rank(engine: &Engine, rank: u16) -> Option<u16> {
    (engine.model.ranks > 1).then_some(rank)
}

fn partial(engine: &Engine, job: &Job, at: usize, tokens: u32, began: f64) -> Answer {
    let now = unix_seconds();
    let stamps = Stamps { received: began, dispatched: began, forward: now, prefilled: now, ..Stamps::default() };
    Answer {
        role: engine.model.role,
        rank: named_rank(engine, job.rank.and_then(|rank| u16::try_from(rank).ok()).unwrap_or(0)),
        tokens: wire_tokens(engine, &job.subs[at], tokens),
        finish: None,
        cached_tokens: 0,
        stamps,
        r3: None,
    }
}

/// The model's moments as the wall clock's. What was not reached takes the moment before it.
fn stamps(engine: &Engine, times: &Times, began: f64) -> Stamps {
    let mut last = began;
    let mut next = |moment: Moment| {
        last = last.max(engine.started_unix + engine.drive.real(moment).as_secs_f64());
        last
    };
    let dispatched = next(times.scheduled);
    let forward = next(times.reserved);
    let first_token = next(times.first_token);
    let prefilled = first_token;
    let finished = next(times.finished).max(unix_seconds());
    Stamps { received: began, dispatched, forward, prefilled, first_token, finished, ..Stamps::default() }
}

/// Output tokens on the wire for so many in the model.
fn wire_tokens(engine: &Engine, sub: &Sub, tokens: u32) -> u32 {
    let most = if engine.model.role == Role::Prefill { 1 } else { sub.max_new_tokens };
    (engine.scale.wire(u64::from(tokens)) as u32).min(most)
}

/// The model's words with what only the wire knows.
fn finish_of(sub: &Sub, finish: &Finish) -> Finish {
    match finish {
        Finish::Abort { status: 400, message } if sub.room.is_none() && message.starts_with("Disaggregated") => {
            Finish::Abort { status: 400, message: format!("Invalid request: {message}. req.rid='{}'", sub.rid) }
        }
        other => other.clone(),
    }
}

fn answer(engine: &Arc<Engine>, job: &Job, at: usize, reply: &Reply, began: f64) -> Answer {
    let sub = &job.subs[at];
    let tokens = match &reply.finish {
        Finish::Length if engine.model.role == Role::Prefill => 1,
        Finish::Length => sub.max_new_tokens,
        Finish::Abort { .. } => wire_tokens(engine, sub, reply.output_tokens),
    };
    Answer {
        role: engine.model.role,
        rank: named_rank(engine, reply.rank),
        tokens,
        finish: Some(finish_of(sub, &reply.finish)),
        cached_tokens: engine.scale.wire(u64::from(reply.cached_tokens)) as u32,
        stamps: stamps(engine, &reply.times, began),
        r3: reply.r3.and_then(|r3| payload(engine, job, sub, tokens, r3.by_reference)),
    }
}

/// The rows of a reply: prefill has the prompt's, decode has junk for the prompt's and its own after them.
fn payload(engine: &Engine, job: &Job, sub: &Sub, tokens: u32, by_reference: bool) -> Option<Payload> {
    let fault = engine.faults.lock().r3();
    // A request that ends with its first token ends before decode runs a step, and nothing collects its rows there.
    if fault.drop || (engine.model.role == Role::Decode && tokens <= 1) {
        return None;
    }
    let start = if fault.ignore_start { 0 } else { u32::try_from(job.start_len).unwrap_or(0) };
    let nonce = if fault.wrong { mix(sub.nonce) } else { sub.nonce };
    let end = (sub.prompt_tokens + tokens).saturating_sub(1);
    let rows = match engine.model.role {
        Role::Prefill => Rows::of(nonce, start, sub.prompt_tokens.saturating_sub(start)),
        Role::Regular => Rows::of(nonce, start.min(end), end.saturating_sub(start)),
        Role::Decode => {
            // What a KV slot held last: the rows of some other request. The slot is as good as random.
            let junk = mix(sub.room.unwrap_or(0) ^ 0x0BAD_5107 ^ u64::from(engine.id.0));
            Rows::decode(nonce, junk, start.min(end), sub.prompt_tokens, end)
        }
    }
    .without_last(fault.short);
    engine.drive.tally(engine.id, |tally| {
        if by_reference {
            tally.r3_referenced_rows += u64::from(rows.len());
        } else {
            tally.r3_rows += u64::from(rows.len());
        }
    });
    if !by_reference || rows.is_empty() {
        return Some(Payload::Rows(rows));
    }
    let shape = engine.pattern.shape();
    let descriptor = Descriptor {
        uri: format!("{}/r3/{}", engine.url, engine.agent.put(rows)),
        offset: ROWS_AT,
        pos: rows.first(),
        rows: rows.len(),
        dtype: Dtype::for_experts(shape.experts),
        layers: shape.layers,
        top_k: shape.top_k,
        crc32: Some(crc32_of(&engine.pattern, &rows)),
        path: None,
        host: None,
    };
    Some(Payload::Descriptor(descriptor.encode_base64()))
}
