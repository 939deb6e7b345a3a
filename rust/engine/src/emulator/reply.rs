//! The JSON of `/generate` replies, key by key in SGLang's order, with R3 text left as a hole that is filled while it is sent.
use std::io::Write as _;
use std::sync::Arc;

use r3router_core::topology::Role;

use super::body::Piece;
use super::pattern::{Pattern, Rows, TextStream, mix};
use super::request::{Api, Job, Sub};
use crate::model::{Finish, Version};

/// Ids of generated tokens are `FIRST_ID..FIRST_ID + ID_SPAN`.
const FIRST_ID: u32 = 1_000;
const ID_SPAN: u64 = 20_000;
/// Salt of what prompt tokens without ids are called.
const PROMPT_SALT: u64 = 0x0050_524F_4D50_5400;

/// What stands in `routed_experts`.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// The rows, in-line.
    Rows(Rows),
    /// The plug-in's descriptor, already in base64.
    Descriptor(String),
}

/// What an engine made of one generation so far.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) role: Role,
    /// The rank that serves it; an engine of one rank says `null`.
    pub(crate) rank: Option<u16>,
    /// Tokens generated so far.
    pub(crate) tokens: u32,
    /// `None` while the stream runs.
    pub(crate) finish: Option<Finish>,
    pub(crate) cached_tokens: u32,
    pub(crate) stamps: Stamps,
    pub(crate) r3: Option<Payload>,
}

/// When what happened, seconds since 1970. SGLang adds them when its metrics are on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stamps {
    pub(crate) received: f64,
    pub(crate) dispatched: f64,
    pub(crate) forward: f64,
    pub(crate) prefilled: f64,
    pub(crate) first_token: f64,
    pub(crate) finished: f64,
    /// When the first event of a stream left; `None` in whole form.
    pub(crate) first_event: Option<f64>,
    /// Whether this is that event.
    pub(crate) is_first_event: bool,
}

/// What every reply of an engine says alike.
#[derive(Clone, Debug)]
pub(crate) struct Voice {
    pub(crate) version: Version,
    pub(crate) pattern: Arc<Pattern>,
    pub(crate) weight_version: Arc<str>,
    pub(crate) model: String,
}

/// Id of generated token `index`. The same on both halves, as the first token travels with the KV.
pub fn output_id(nonce: u64, index: u32) -> u32 {
    FIRST_ID + (mix(nonce ^ (u64::from(index) << 32)) % ID_SPAN) as u32
}

/// Text of a token.
pub(crate) fn token_text(id: u32) -> String {
    format!(" t{id}")
}

/// Log-probability of token `index` after the prompt (negative positions: prompt tokens), an exact decimal.
pub(crate) fn logprob(nonce: u64, position: u64) -> f64 {
    -((mix(nonce.rotate_left(17) ^ position) % 1024) as f64) / 256.0
}

/// Generated text so far.
pub(crate) fn text(nonce: u64, tokens: u32) -> String {
    (0..tokens).map(|i| token_text(output_id(nonce, i))).collect()
}

/// Collects pieces of a body.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) buf: Vec<u8>,
}

impl Writer {
    pub(crate) fn push(&mut self, text: &str) {
        self.buf.extend_from_slice(text.as_bytes());
    }

    /// Writes a value as JSON.
    pub(crate) fn json(&mut self, value: &(impl serde::Serialize + ?Sized)) {
        // Strings and numbers always serialise; a Vec cannot fail to be written to.
        let _infallible = serde_json::to_writer(&mut self.buf, value);
    }

    pub(crate) fn fmt(&mut self, args: std::fmt::Arguments<'_>) {
        let _infallible = self.buf.write_fmt(args);
    }

    /// Writes a payload as a JSON string.
    pub(crate) fn payload(&mut self, payload: &Payload, pattern: &Arc<Pattern>) {
        self.push("\"");
        match payload {
            Payload::Descriptor(text) => self.push(text),
            Payload::Rows(rows) => {
                self.pieces.push(std::mem::take(&mut self.buf).into());
                self.pieces.push(Piece::Text(TextStream::new(pattern.clone(), *rows)));
            }
        }
        self.push("\"");
    }

    pub(crate) fn finish(mut self) -> Vec<Piece> {
        if !self.buf.is_empty() {
            self.pieces.push(self.buf.into());
        }
        self.pieces
    }
}

/// Writes the separator before every element but the first.
fn comma(w: &mut Writer, index: u64) {
    if index > 0 {
        w.push(",");
    }
}

/// `finish_reason` of a reply.
pub(crate) fn finish_reason(w: &mut Writer, answer: &Answer) {
    match &answer.finish {
        None => w.push("null"),
        // Prefill stops by its own limit of one token and reports a length of 0.
        Some(Finish::Length) if answer.role == Role::Prefill => w.push(r#"{"type":"length","length":0}"#),
        Some(Finish::Length) => w.fmt(format_args!(r#"{{"type":"length","length":{}}}"#, answer.tokens)),
        Some(Finish::Abort { status, message }) => {
            w.push(r#"{"type":"abort","message":"#);
            w.json(message);
            match status {
                200 => w.push(r#","status_code":null,"err_type":null}"#),
                400 => w.push(r#","status_code":400,"err_type":"BadRequestError"}"#),
                503 => w.push(r#","status_code":503,"err_type":"ServiceUnavailableError"}"#),
                other => w.fmt(format_args!(r#","status_code":{other},"err_type":"InternalServerError"}}"#)),
            }
        }
    }
}

/// First prompt position with an input logprob; without a start there are none.
fn logprob_start(job: &Job, sub: &Sub) -> u32 {
    u32::try_from(job.logprob_start).map_or(sub.prompt_tokens, |start| start.min(sub.prompt_tokens))
}

fn prompt_id(sub: &Sub, position: u32) -> u32 {
    sub.ids.get(position as usize).copied().unwrap_or_else(|| output_id(sub.nonce ^ PROMPT_SALT, position))
}

fn top(w: &mut Writer, nonce: u64, position: u64, id: u32, count: u32) {
    w.push("[");
    for k in 0..count {
        comma(w, u64::from(k));
        w.fmt(format_args!("[{},{},null]", logprob(nonce, position) - f64::from(k), id + k));
    }
    w.push("]");
}

fn chosen(w: &mut Writer, nonce: u64, position: u64, ids: &[u32]) {
    w.push("[");
    for (k, id) in ids.iter().enumerate() {
        comma(w, k as u64);
        w.fmt(format_args!("[{},{id},null]", logprob(nonce ^ u64::from(*id), position)));
    }
    w.push("]");
}

/// The text of a token in a logprob entry: the OpenAI routes ask for it, `/generate` does not.
fn entry_text(job: &Job, id: u32) -> String {
    if job.api == Api::Generate { "null".to_owned() } else { serde_json::Value::from(token_text(id)).to_string() }
}

/// The logprob lists. Prompt positions are known to the half that ran the prompt: decode leaves its `input_*` lists empty.
fn logprobs(w: &mut Writer, job: &Job, sub: &Sub, answer: &Answer) {
    let prompt = if answer.role == Role::Decode { 0..0 } else { logprob_start(job, sub)..sub.prompt_tokens };
    let prompt_at = |position: u32| u64::from(position) | 1 << 40;
    w.push(r#","input_token_logprobs":["#);
    for (i, position) in prompt.clone().enumerate() {
        comma(w, i as u64);
        if i == 0 {
            w.fmt(format_args!("[null,{},null]", prompt_id(sub, position)));
        } else {
            let id = prompt_id(sub, position);
            w.fmt(format_args!("[{},{id},{}]", logprob(sub.nonce, prompt_at(position)), entry_text(job, id)));
        }
    }
    w.push(r#"],"output_token_logprobs":["#);
    for i in 0..answer.tokens {
        comma(w, u64::from(i));
        let id = output_id(sub.nonce, i);
        w.fmt(format_args!("[{},{id},{}]", logprob(sub.nonce, u64::from(i)), entry_text(job, id)));
    }
    w.fmt(format_args!(r#"],"output_token_logprobs_length":{}"#, answer.tokens));
    if job.top_logprobs > 0 {
        w.push(r#","input_top_logprobs":["#);
        for (i, position) in prompt.clone().enumerate() {
            comma(w, i as u64);
            if i == 0 {
                w.push("null");
            } else {
                top(w, sub.nonce, prompt_at(position), prompt_id(sub, position), job.top_logprobs);
            }
        }
        w.push(r#"],"output_top_logprobs":["#);
        for i in 0..answer.tokens {
            comma(w, u64::from(i));
            top(w, sub.nonce, u64::from(i), output_id(sub.nonce, i), job.top_logprobs);
        }
        w.push("]");
    }
    if let Some(ids) = &job.token_ids_logprob {
        w.push(r#","input_token_ids_logprobs":["#);
        for (i, position) in prompt.enumerate() {
            comma(w, i as u64);
            if i == 0 {
                w.push("null");
            } else {
                chosen(w, sub.nonce, prompt_at(position), ids);
            }
        }
        w.push(r#"],"output_token_ids_logprobs":["#);
        for i in 0..answer.tokens {
            comma(w, u64::from(i));
            if i == 0 && answer.role == Role::Decode {
                // The metadata rows that carry the first token have no room for it.
                w.push("null");
            } else {
                chosen(w, sub.nonce, u64::from(i), ids);
            }
        }
        w.push("]");
    }
}

/// What the scheduler stamps. Decode did not run the prompt and knows less.
fn scheduler_stamps(w: &mut Writer, answer: &Answer) {
    let at = &answer.stamps;
    if answer.role != Role::Decode {
        w.push(r#","storage_prefetch_wait":0.0,"storage_staging_wait":0.0"#);
    }
    w.fmt(format_args!(r#","forward_entry_time":{:.6}"#, at.forward));
    if answer.role != Role::Decode {
        w.fmt(format_args!(r#","prefill_finished_time":{:.6}"#, at.prefilled));
    }
    w.fmt(format_args!(r#","queue_time":{:.6}"#, (at.forward - at.dispatched).max(0.0)));
}

/// What the front end stamps at the end.
fn frontend_stamps(w: &mut Writer, answer: &Answer) {
    let at = &answer.stamps;
    let first_token =
        if answer.role == Role::Decode && at.first_event.is_none() { at.finished } else { at.first_token };
    w.fmt(format_args!(
        r#","e2e_latency":{:.6},"request_received_ts":{:.6},"first_token_latency":{:.6},"api_server_dispatch_finish_ts":{:.6}"#,
        at.finished - at.received,
        at.received,
        first_token - at.received,
        at.dispatched
    ));
    if let Some(first) = at.first_event {
        w.fmt(format_args!(r#","response_sent_to_client_ts":{first:.6}"#));
    }
    w.fmt(format_args!(r#","request_finished_ts":{:.6}"#, at.finished));
    if answer.tokens > 1 && at.finished > first_token {
        let rate = f64::from(answer.tokens - 1) / (at.finished - first_token);
        w.fmt(format_args!(r#","decode_throughput":{rate:.6}"#));
    }
    if at.first_event.is_none() {
        w.fmt(format_args!(r#","response_sent_to_client_ts":{:.6}"#, at.finished));
    }
}

/// The versions of the weights that made the tokens.
pub(crate) fn weight_versions(w: &mut Writer, voice: &Voice, tokens: u32) {
    w.push(r#","weight_versions":[{"version":"#);
    w.json(&*voice.weight_version);
    w.fmt(format_args!(r#","start":0,"end":{tokens}}}]"#));
}

/// The `meta_info` object.
pub(crate) fn meta_info(w: &mut Writer, voice: &Voice, job: &Job, sub: &Sub, answer: &Answer) {
    let new = voice.version == Version::V0_5_23;
    w.push(r#"{"id":"#);
    w.json(&sub.rid);
    w.push(r#","finish_reason":"#);
    finish_reason(w, answer);
    w.fmt(format_args!(r#","prompt_tokens":{},"weight_version":"#, sub.prompt_tokens));
    w.json(&*voice.weight_version);
    w.push(r#","num_retractions":0"#);
    if new {
        scheduler_stamps(w, answer);
    }
    if job.logprobs {
        logprobs(w, job, sub, answer);
    }
    w.fmt(format_args!(
        r#","reasoning_tokens":0,"completion_tokens":{},"cached_tokens":{}"#,
        answer.tokens, answer.cached_tokens
    ));
    if new {
        if answer.finish.is_some() {
            weight_versions(w, voice, answer.tokens);
        }
        match answer.cached_tokens {
            0 => w.push(r#","cached_tokens_details":null"#),
            cached => w.fmt(format_args!(r#","cached_tokens_details":{{"device":{cached},"host":0}}"#)),
        }
    }
    if let Some(payload) = &answer.r3 {
        w.push(r#","routed_experts":"#);
        w.payload(payload, &voice.pattern);
    }
    match answer.rank {
        Some(rank) => w.fmt(format_args!(r#","dp_rank":{rank}"#)),
        None => w.push(r#","dp_rank":null"#),
    }
    if answer.finish.is_some() && new {
        frontend_stamps(w, answer);
    } else if answer.finish.is_some() {
        w.fmt(format_args!(r#","e2e_latency":{:.6}"#, answer.stamps.finished - answer.stamps.received));
    } else if answer.stamps.is_first_event
        && let Some(first) = answer.stamps.first_event
    {
        w.fmt(format_args!(r#","response_sent_to_client_ts":{first:.6}"#));
    }
    w.push("}");
}

/// One `/generate` object: text and ids so far, and `meta_info`. `index` is given in streams of more than one generation.
pub(crate) fn generate(w: &mut Writer, voice: &Voice, job: &Job, index: Option<usize>, sub: &Sub, answer: &Answer) {
    w.push(r#"{"text":"#);
    w.json(&text(sub.nonce, answer.tokens));
    w.push(r#","output_ids":["#);
    for i in 0..answer.tokens {
        comma(w, u64::from(i));
        w.fmt(format_args!("{}", output_id(sub.nonce, i)));
    }
    w.push(r#"],"meta_info":"#);
    meta_info(w, voice, job, sub, answer);
    if let Some(index) = index {
        w.fmt(format_args!(r#","index":{index}"#));
    }
    w.push("}");
}

/// The whole reply of a non-streaming `/generate`.
pub(crate) fn generate_reply(voice: &Voice, job: &Job, answers: &[Answer]) -> Vec<Piece> {
    let mut w = Writer::default();
    if job.list {
        w.push("[");
    }
    for (i, (sub, answer)) in job.subs.iter().zip(answers).enumerate() {
        comma(&mut w, i as u64);
        generate(&mut w, voice, job, None, sub, answer);
    }
    if job.list {
        w.push("]");
    }
    w.finish()
}

/// One SSE event of a streaming `/generate`.
pub(crate) fn generate_chunk(voice: &Voice, job: &Job, at: usize, answer: &Answer) -> Vec<Piece> {
    let mut w = Writer::default();
    w.push("data: ");
    generate(&mut w, voice, job, (job.subs.len() > 1).then_some(at), &job.subs[at], answer);
    w.push("\n\n");
    w.finish()
}
