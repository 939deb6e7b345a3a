//! The Python processes around the scheduler: the HTTP loop and the detokenizer, each a single server, first in first out.
//! What makes a front end deaf under R3 (6.3, 6.6) happens here.
use std::time::Duration;

use r3router_core::time::Moment;

use super::config::EngineConfig;
use super::event::{Effect, Key, Reply};
use super::request::ReqId;
use super::timers::{Out, Timer};

/// What the HTTP loop does when its turn comes.
#[derive(Debug)]
pub(super) enum HttpJob {
    /// A generate body is parsed.
    Ingested(ReqId),
    /// A control request is parsed.
    Control(Control),
    /// A chunk leaves.
    Chunk(Key, u32),
    /// A reply leaves.
    Emit(Key, Box<Reply>, ReqId),
    /// A reply whose client has left is dropped.
    Drop(ReqId),
    /// An answer leaves.
    Answer(Key, u16),
}

/// A control request on its way.
#[derive(Clone, Debug)]
pub(super) enum Control {
    Abort {
        key: Option<Key>,
        rid: std::sync::Arc<str>,
        all: bool,
    },
    Pause(Key, super::event::PauseMode),
    Continue(Key),
    Flush(Key),
    /// Answered by the scheduler with 200 (`/server_info`, `/v1/loads` by round trip).
    Ask(Key),
    /// The fake request of a health check.
    Fake,
    /// `/health`.
    Health(Key),
    /// Answered by the HTTP loop.
    Turn(Key),
}

/// One output of one request in a message.
#[derive(Debug)]
pub(super) enum Output {
    /// Tokens of a stream.
    Chunk(Key, u32),
    /// The end.
    Final(ReqId, Option<Key>, Box<Reply>),
}

/// What one rank's scheduler sends in one turn of its loop.
#[derive(Debug, Default)]
pub(super) struct Message {
    /// R3 bytes in it, raw; 0 when they leave by reference.
    pub(super) raw: u64,
    /// The outputs.
    pub(super) outputs: Vec<Output>,
}

/// The two servers behind the scheduler.
#[derive(Debug, Default)]
pub(super) struct Frontend {
    http_free: Moment,
    detokenizer_free: Moment,
    /// When the last scheduler output reached the HTTP process (health checks wait for one).
    pub(super) last_output: Moment,
}

/// Time for `bytes` at `rate` bytes per second.
pub(super) fn at_rate(bytes: u64, rate: f64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate.max(1e-9))
}

impl Frontend {
    /// Queues a job of the HTTP loop.
    pub(super) fn http(&mut self, cost: Duration, job: HttpJob, out: &mut Out<'_>) {
        self.http_free = self.http_free.max(out.now) + cost;
        out.at(self.http_free, Timer::Http(job));
    }

    /// The HTTP loop does nothing else until then.
    pub(super) fn stall_http(&mut self, cost: Duration, now: Moment) {
        self.http_free = self.http_free.max(now) + cost;
    }

    /// A message reaches the detokenizer.
    pub(super) fn detokenize(&mut self, message: Message, config: &EngineConfig, out: &mut Out<'_>) {
        let small = config.frontend.detokenizer_message
            + config.frontend.detokenizer_reply * u32::try_from(message.outputs.len()).unwrap_or(u32::MAX);
        let cost = small + at_rate(message.raw, config.r3.detokenizer);
        self.detokenizer_free = self.detokenizer_free.max(out.now) + cost;
        out.at(self.detokenizer_free, Timer::Detokenized(message));
    }

    /// A message comes back from the detokenizer: unpickled as a whole, then written reply by reply.
    pub(super) fn emit(&mut self, message: Message, config: &EngineConfig, out: &mut Out<'_>) {
        self.stall_http(at_rate(message.raw, config.r3.http_unpickle), out.now);
        self.last_output = self.http_free;
        for output in message.outputs {
            match output {
                Output::Chunk(key, tokens) => self.http(config.frontend.http_chunk, HttpJob::Chunk(key, tokens), out),
                Output::Final(id, key, reply) => {
                    let text = reply
                        .r3
                        .filter(|r| !r.by_reference)
                        .map_or(0, |r| u64::from(r.rows) * u64::from(config.r3.row_bytes));
                    match key {
                        Some(key) => {
                            let cost = config.frontend.http_turn + at_rate(text, config.r3.http_write);
                            self.http(cost, HttpJob::Emit(key, reply, id), out);
                        }
                        None => self.http(config.frontend.http_chunk, HttpJob::Drop(id), out),
                    }
                }
            }
        }
    }
}

/// The effect of a job that needs nothing but its own data.
pub(super) fn plain_effect(job: &HttpJob) -> Option<Effect> {
    match job {
        HttpJob::Chunk(key, tokens) => Some(Effect::Chunk { key: *key, tokens: *tokens }),
        HttpJob::Answer(key, status) => Some(Effect::Answer { key: *key, status: *status }),
        _ => None,
    }
}
