//! Replies as engines send them, bodies cut at any byte, and what is expected of a merge.
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use r3router_core::error::Error;
use r3router_core::wire::{Facts, Route, scan};
use r3router_proxy::merge::{Account, Plan, PrefillPart, merge_json, read_prefill};
use r3router_proxy::store::Arena;

/// A body that comes in the given chunks.
pub(crate) struct Chunks(VecDeque<Bytes>);

impl Chunks {
    pub(crate) fn of(bytes: &[u8], chunk: usize) -> Self {
        Self(bytes.chunks(chunk.max(1)).map(Bytes::copy_from_slice).collect())
    }

    pub(crate) fn list(parts: Vec<Vec<u8>>) -> Self {
        Self(parts.into_iter().map(Bytes::from).collect())
    }
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|c| Ok(Frame::data(c))))
    }
}

/// All bytes of a body.
pub(crate) async fn all<B>(body: B) -> Vec<u8>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Debug,
{
    let whole = http_body_util::BodyExt::collect(body).await.unwrap();
    whole.to_bytes().to_vec()
}

/// Rows `[from, until)` of `row` numbers each, by `value(position, item)`, as the engine writes them.
pub(crate) fn rows(from: usize, until: usize, row: usize, value: impl Fn(usize, usize) -> i32) -> Vec<u8> {
    (from..until).flat_map(|p| (0..row).map(move |i| (p, i))).flat_map(|(p, i)| value(p, i).to_le_bytes()).collect()
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

pub(crate) const A: i32 = 3;
pub(crate) const POISON: i32 = 77;
pub(crate) const C: i32 = 200;

/// One request as both legs see it.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) prompt: usize,
    pub(crate) output: usize,
    pub(crate) row: usize,
    pub(crate) start: usize,
    /// What decode is asked for, and whether it obeys.
    pub(crate) decode_start: usize,
    pub(crate) obeys: bool,
    pub(crate) place: Place,
    /// Bytes of a number on the wire, and whether the reply names the dtype.
    pub(crate) dtype: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Meta,
    ChatExt,
    ChatMeta,
    Completions,
}

impl Case {
    pub(crate) fn new(place: Place) -> Self {
        Self { prompt: 5, output: 3, row: 4, start: 0, decode_start: 0, obeys: true, place, dtype: None }
    }

    pub(crate) fn plan(&self) -> Plan {
        Plan { routed_experts: true, decode_start: self.decode_start as u32, ..Plan::of(&self.facts(), 0, None) }
    }

    pub(crate) fn facts(&self) -> Facts {
        let body = format!(r#"{{"routed_experts_start_len":{},"return_routed_experts":true}}"#, self.start);
        scan(body.as_bytes(), self.route()).unwrap()
    }

    pub(crate) fn route(&self) -> Route {
        match self.place {
            Place::Meta => Route::Generate,
            Place::Completions => Route::Completions,
            _ => Route::Chat,
        }
    }

    fn wire(&self, rows: &[u8]) -> Vec<u8> {
        let size = match self.dtype {
            Some("uint8") => 1,
            Some("uint16") => 2,
            _ => 4,
        };
        rows.chunks(4).flat_map(|n| n[..size].to_vec()).collect()
    }

    fn dtype_member(&self) -> String {
        self.dtype.map_or_else(String::new, |d| format!(r#","routed_experts_dtype":"{d}""#))
    }

    pub(crate) fn prefill_payload(&self) -> String {
        base64(&self.wire(&rows(self.start, self.prompt, self.row, |_, _| A)))
    }

    pub(crate) fn decode_payload(&self) -> String {
        let from = if self.obeys { self.decode_start } else { 0 };
        let until = (self.prompt + self.output).saturating_sub(1);
        let value = |p: usize, _| if p < self.prompt { POISON } else { C };
        base64(&self.wire(&rows(from, until.max(from), self.row, value)))
    }

    pub(crate) fn merged_payload(&self) -> String {
        let until = (self.prompt + self.output).saturating_sub(1);
        let value = |p: usize, _| if p < self.prompt { A } else { C };
        base64(&self.wire(&rows(self.start, until, self.row, value)))
    }

    /// A reply with `payload` (the whole JSON value, or "" for none) at the case's place.
    pub(crate) fn reply(&self, output: usize, payload: Option<&str>, text: &str) -> String {
        let p = self.prompt;
        let member = |comma: &str| {
            payload.map_or_else(String::new, |v| format!("{comma}\"routed_experts\":{v}{}", self.dtype_member()))
        };
        let usage =
            format!(r#""usage":{{"prompt_tokens":{p},"total_tokens":{},"completion_tokens":{output}}}"#, p + output);
        let meta = format!(
            r#"{{"id":"r","finish_reason":{{"type":"length","length":{output}}},"prompt_tokens":{p},"num_retractions":0,"completion_tokens":{output},"cached_tokens":2{},"dp_rank":1}}"#,
            member(",")
        );
        let ext = payload.map_or_else(String::new, |_| format!(r#","sglext":{{{}}}"#, member("")));
        match self.place {
            Place::Meta => format!(r#"{{"text":"{text}","output_ids":[1,2],"meta_info":{meta}}}"#),
            Place::ChatMeta => format!(
                r#"{{"id":"r","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"length","meta_info":{meta}}}],{usage}}}"#
            ),
            Place::ChatExt => format!(
                r#"{{"id":"r","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"length"}}],{usage}{ext}}}"#
            ),
            Place::Completions => {
                format!(
                    r#"{{"id":"r","choices":[{{"index":0,"text":"{text}","finish_reason":"length"}}],{usage}{ext}}}"#
                )
            }
        }
    }

    pub(crate) fn quoted(payload: &str) -> String {
        format!("\"{payload}\"")
    }

    pub(crate) fn prefill(&self) -> String {
        self.reply(1, Some(&Self::quoted(&self.prefill_payload())), "p")
    }

    pub(crate) fn decode(&self) -> String {
        self.reply(self.output, Some(&Self::quoted(&self.decode_payload())), "de \\\" routed_experts")
    }

    pub(crate) fn merged(&self) -> String {
        self.reply(self.output, Some(&Self::quoted(&self.merged_payload())), "de \\\" routed_experts")
    }
}

pub(crate) struct Done {
    pub(crate) bytes: Vec<u8>,
    pub(crate) account: Account,
    pub(crate) held: u64,
}

impl Done {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap()
    }
}

pub(crate) async fn prefill_part(reply: &str, plan: &Plan, arena: &Arena, chunk: usize) -> Result<PrefillPart, Error> {
    read_prefill(Chunks::of(reply.as_bytes(), chunk), Some(reply.len() as u64), plan, arena).await
}

/// Both legs through the merge, each in chunks of `chunk`.
pub(crate) async fn merge(prefill: &str, decode: &str, plan: &Plan, chunk: usize) -> Result<Done, Error> {
    let arena = Arena::new(64 << 20);
    let part = prefill_part(prefill, plan, &arena, chunk);
    let merged =
        merge_json(Chunks::of(decode.as_bytes(), chunk), Some(decode.len() as u64), part, plan, &arena).await?;
    let (length, account, held) = (merged.content_length(), merged.account, arena.used());
    let bytes = all(merged).await;
    assert_eq!(bytes.len() as u64, length, "content-length");
    assert_eq!(arena.used(), 0, "the arena is given back");
    Ok(Done { bytes, account, held })
}
