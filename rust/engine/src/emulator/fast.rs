//! The fast mode: prepared small replies at once, no model, for latency and throughput runs. Only the route and `stream` are looked at.
use bytes::Bytes;
use http::{HeaderValue, Response, header};
use r3router_core::topology::Role;

use super::body::EngineBody;
use super::pattern::{Pattern, R3Shape};
use super::reply::{Answer, Stamps, Voice};
use super::request::{Api, Job};
use super::{openai, reply};
use crate::model::Finish;

/// Prepared replies of one engine.
pub(crate) struct Prepared {
    whole: [Bytes; 3],
    stream: [Bytes; 3],
}

const APIS: [(Api, &str); 3] = [
    (Api::Generate, r#"{"rid":"fast","input_ids":[1,2,3,4,5,6,7,8],"sampling_params":{"max_new_tokens":4}}"#),
    (Api::Chat, r#"{"rid":"fast","messages":[{"role":"user","content":"fast"}],"max_tokens":4}"#),
    (Api::Completions, r#"{"rid":"fast","prompt":"fast","max_tokens":4}"#),
];

fn flat(pieces: Vec<super::body::Piece>) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in pieces {
        if let super::body::Piece::Bytes(bytes) = piece {
            out.extend_from_slice(&bytes);
        }
    }
    out
}

impl Prepared {
    pub(crate) fn new(role: Role, model: &str, version: crate::model::Version) -> Self {
        let voice = Voice {
            version,
            pattern: Pattern::new(R3Shape::default()),
            weight_version: "default".into(),
            model: model.to_owned(),
        };
        let mut out = Self { whole: Default::default(), stream: Default::default() };
        for (i, (api, body)) in APIS.iter().enumerate() {
            let Ok(job) = Job::parse(*api, body.as_bytes()) else { continue };
            let answer = Answer {
                role,
                rank: Some(0),
                tokens: if role == Role::Prefill { 1 } else { 4 },
                finish: Some(Finish::Length),
                cached_tokens: 0,
                stamps: Stamps::default(),
                r3: None,
            };
            let answers = [answer];
            let (whole, mut stream) = if *api == Api::Generate {
                (
                    reply::generate_reply(&voice, &job, &answers),
                    flat(reply::generate_chunk(&voice, &job, 0, &answers[0])),
                )
            } else {
                let mut stream = flat(openai::role_chunk(&voice, &job, 0));
                stream.extend(flat(openai::delta_chunk(&voice, &job, 0, &answers[0], 0)));
                stream.extend(flat(openai::tail_chunks(&voice, &job, &answers)));
                (openai::reply(&voice, &job, &answers), stream)
            };
            stream.extend_from_slice(b"data: [DONE]\n\n");
            out.whole[i] = flat(whole).into();
            out.stream[i] = stream.into();
        }
        out
    }

    /// The reply to a body.
    pub(crate) fn reply(&self, api: Api, body: &[u8]) -> Response<EngineBody> {
        let at = match api {
            Api::Generate => 0,
            Api::Chat => 1,
            Api::Completions => 2,
        };
        let stream = streams(body);
        let bytes = if stream { &self.stream[at] } else { &self.whole[at] };
        let mut response = Response::new(EngineBody::bytes(bytes.clone()));
        let kind = if stream { "text/event-stream; charset=utf-8" } else { "application/json" };
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }
}

/// Whether a body asks for a stream. A prompt that contains these very bytes would have them escaped.
fn streams(body: &[u8]) -> bool {
    memchr::memmem::find(body, b"\"stream\":").is_some_and(|at| body[at + 9..].trim_ascii_start().starts_with(b"true"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prepared_replies_are_those_of_the_routes() {
        let prepared = Prepared::new(Role::Prefill, "m", crate::model::Version::V0_5_23);
        let value: serde_json::Value = serde_json::from_slice(&prepared.whole[0]).unwrap();
        assert_eq!(value["meta_info"]["completion_tokens"], 1);
        assert_eq!(value["meta_info"]["finish_reason"]["length"], 0);
        let chat: serde_json::Value = serde_json::from_slice(&prepared.whole[1]).unwrap();
        assert_eq!(chat["object"], "chat.completion");
        assert!(prepared.stream.iter().all(|s| s.ends_with(b"data: [DONE]\n\n")));
        assert!(
            streams(br#"{"stream": true}"#)
                && !streams(br#"{"stream":false}"#)
                && !streams(br#"{"text":"\"stream\":true"}"#)
        );
    }
}
