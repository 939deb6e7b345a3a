//! The reply to a request that was aborted before decode had begun it: what an engine gives to one that waited - an empty answer whose
//! finish reason is `abort`. Trainers keep the sample for later; an error they would send again at once.
use bytes::Bytes;
use http::{HeaderValue, Response, header};
use r3router_core::wire::Route;
use serde_json::{Value, json};

use crate::body::ReplyBody;
use crate::clock::unix_now;
use crate::context::Shared;
use crate::errors::Reply;
use crate::live::Kept;

/// Makes the reply. `kept` is prefill's own, when prefill ended it.
pub fn reply(shared: &Shared, id: &str, kept: Option<&Kept>) -> Reply {
    let stream = shared.facts.stream;
    let kept = kept.filter(|k| k.status.is_success() && (!stream || shared.route == Route::Generate));
    let object = kept.map_or_else(|| Bytes::from(object(shared, id).to_string()), |k| k.body.clone());
    let (content_type, body) = if stream {
        let mut events = b"data: ".to_vec();
        events.extend_from_slice(&object);
        events.extend_from_slice(b"\n\ndata: [DONE]\n\n");
        ("text/event-stream; charset=utf-8", Bytes::from(events))
    } else {
        ("application/json", object)
    };
    let mut reply = Response::new(ReplyBody::from(body));
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

fn object(shared: &Shared, id: &str) -> Value {
    let prompt = shared.facts.prompt(0);
    let tokens = prompt.ids.unwrap_or(0);
    let message = "Aborted before decode had begun";
    let usage = json!({ "prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens });
    let (kind, choice) = match (shared.route, shared.facts.stream) {
        (Route::Generate, _) => {
            let mut meta = json!({
                "id": id,
                "finish_reason": { "type": "abort", "message": message, "status_code": null },
                "prompt_tokens": tokens, "completion_tokens": 0, "cached_tokens": 0,
            });
            if shared.facts.logprobs
                && let Some(meta) = meta.as_object_mut()
            {
                meta.insert("output_token_logprobs".into(), json!([]));
            }
            return json!({ "text": "", "output_ids": [], "meta_info": meta });
        }
        (Route::Chat, false) => ("chat.completion", json!({ "message": { "role": "assistant", "content": "" } })),
        (Route::Chat, true) => ("chat.completion.chunk", json!({ "delta": { "role": "assistant", "content": "" } })),
        (Route::Completions, _) => ("text_completion", json!({ "text": "" })),
    };
    let mut choice = choice;
    if let Some(choice) = choice.as_object_mut() {
        choice.insert("index".into(), 0.into());
        choice.insert("finish_reason".into(), "abort".into());
    }
    json!({ "id": id, "object": kind, "created": unix_now() as u64, "model": shared.model, "choices": [choice], "usage": usage })
}
