//! The JSON of the OpenAI routes as SGLang writes it, whole and in SSE.
use std::sync::Arc;

use r3router_core::topology::Role;

use super::body::Piece;
use super::clock::unix_seconds;
use super::pattern::Pattern;
use super::reply::{Answer, Payload, Voice, Writer, logprob, meta_info, output_id, text, token_text, weight_versions};
use super::request::{Api, Job, Sub};
use crate::model::{Finish, Version};

fn model<'a>(voice: &'a Voice, job: &'a Job) -> &'a str {
    job.model.as_deref().unwrap_or(&voice.model)
}

fn finish_name(answer: &Answer) -> &'static str {
    match answer.finish {
        None => "null",
        Some(Finish::Length) => "\"length\"",
        Some(Finish::Abort { .. }) => "\"abort\"",
    }
}

fn usage(w: &mut Writer, voice: &Voice, job: &Job, answers: &[Answer]) {
    let prompt: u64 = job.subs.iter().step_by(job.n as usize).map(|s| u64::from(s.prompt_tokens)).sum();
    let completion: u64 = answers.iter().map(|a| u64::from(a.tokens)).sum();
    w.fmt(format_args!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion},"prompt_tokens_details":null,"reasoning_tokens":0"#,
        prompt + completion
    ));
    if voice.version == Version::V0_5_23 {
        w.push(r#","completion_tokens_details":null"#);
    }
    w.push("}");
}

fn head(w: &mut Writer, voice: &Voice, job: &Job, object: &str) {
    w.push(r#"{"id":"#);
    w.json(&job.subs[0].rid);
    w.fmt(format_args!(r#","object":"{object}","created":{},"model":"#, unix_seconds() as u64));
    w.json(model(voice, job));
}

/// Chat's logprobs of generated tokens `from..to`.
fn chat_logprobs(w: &mut Writer, job: &Job, sub: &Sub, from: u32, to: u32) {
    if !job.logprobs {
        w.push("null");
        return;
    }
    w.push(r#"{"content":["#);
    for i in from..to {
        if i > from {
            w.push(",");
        }
        let id = output_id(sub.nonce, i);
        let token = token_text(id);
        w.push(r#"{"token":"#);
        w.json(&token);
        w.push(r#","bytes":"#);
        w.json(token.as_bytes());
        w.fmt(format_args!(r#","logprob":{},"top_logprobs":["#, logprob(sub.nonce, u64::from(i))));
        for k in 0..job.top_logprobs {
            if k > 0 {
                w.push(",");
            }
            let token = token_text(id + k);
            w.push(r#"{"token":"#);
            w.json(&token);
            w.push(r#","bytes":"#);
            w.json(token.as_bytes());
            w.fmt(format_args!(r#","logprob":{}}}"#, logprob(sub.nonce, u64::from(i)) - f64::from(k)));
        }
        w.push("]}");
    }
    w.push("]}");
}

/// Completions' logprobs: with `echo` those of the prompt first, from the half that ran it.
fn text_logprobs(w: &mut Writer, job: &Job, sub: &Sub, answer: &Answer, from: u32) {
    if !job.logprobs {
        w.push("null");
        return;
    }
    let prompt = if job.echo && answer.role != Role::Decode && from == 0 { sub.prompt_tokens } else { 0 };
    let mut tokens = Vec::new();
    let mut values = Vec::new();
    for position in 0..prompt {
        tokens.push(token_text(sub.ids.get(position as usize).copied().unwrap_or(position)));
        values.push((position > 0).then(|| logprob(sub.nonce, u64::from(position) | 1 << 40)));
    }
    for i in from..answer.tokens {
        tokens.push(token_text(output_id(sub.nonce, i)));
        values.push(Some(logprob(sub.nonce, u64::from(i))));
    }
    w.push(r#"{"text_offset":"#);
    w.json(&vec![-1; tokens.len()]);
    w.push(r#","token_logprobs":"#);
    w.json(&values);
    w.push(r#","tokens":"#);
    w.json(&tokens);
    w.push(r#","top_logprobs":["#);
    for (i, (token, value)) in tokens.iter().zip(&values).enumerate() {
        if i > 0 {
            w.push(",");
        }
        match value {
            Some(value) if job.top_logprobs > 0 => {
                w.push("{");
                w.json(token);
                w.fmt(format_args!(":{value}}}"));
            }
            _ => w.push("null"),
        }
    }
    w.push("]}");
}

/// `sglext` of a response: the payload of the first choice only, as SGLang does.
fn sglext(w: &mut Writer, pattern: &Arc<Pattern>, answers: &[Answer], streamed: bool) {
    // A stream takes the first choice that has one.
    let payload =
        if streamed { answers.iter().find_map(|a| a.r3.as_ref()) } else { answers.first().and_then(|a| a.r3.as_ref()) };
    if let Some(payload) = payload {
        w.push(r#","sglext":{"routed_experts":"#);
        w.payload(payload, pattern);
        w.push("}");
    }
}

fn has_payload(answer: &Answer) -> bool {
    match &answer.r3 {
        None => false,
        // An empty string is falsy in Python and is left out.
        Some(Payload::Rows(rows)) => !rows.is_empty(),
        Some(Payload::Descriptor(_)) => true,
    }
}

/// The whole reply of a non-streaming call.
pub(crate) fn reply(voice: &Voice, job: &Job, answers: &[Answer]) -> Vec<Piece> {
    let mut w = Writer::default();
    let chat = job.api == Api::Chat;
    head(&mut w, voice, job, if chat { "chat.completion" } else { "text_completion" });
    w.push(r#","choices":["#);
    for (i, (sub, answer)) in job.subs.iter().zip(answers).enumerate() {
        if i > 0 {
            w.push(",");
        }
        let generated = text(sub.nonce, answer.tokens);
        if chat {
            w.fmt(format_args!(r#"{{"index":{i},"message":{{"role":"assistant","content":"#));
            w.json(&generated);
            w.push(r#","reasoning_content":null},"logprobs":"#);
            chat_logprobs(&mut w, job, sub, 0, answer.tokens);
        } else {
            let echo = if job.echo { job.prompts.get(i / job.n as usize).map_or("", String::as_str) } else { "" };
            w.fmt(format_args!(r#"{{"index":{i},"text":"#));
            w.json(&format!("{echo}{generated}"));
            w.push(r#","logprobs":"#);
            text_logprobs(&mut w, job, sub, answer, 0);
        }
        w.fmt(format_args!(r#","finish_reason":{},"matched_stop":null"#, finish_name(answer)));
        if chat && job.meta_info {
            w.push(r#","meta_info":"#);
            meta_info(&mut w, voice, job, sub, answer);
        }
        w.push("}");
    }
    w.push(r#"],"usage":"#);
    usage(&mut w, voice, job, answers);
    w.push(r#","metadata":{"weight_version":"#);
    w.json(&*voice.weight_version);
    if voice.version == Version::V0_5_23 {
        weight_versions(&mut w, voice, answers.first().map_or(0, |a| a.tokens));
    }
    w.push("}");
    if !(chat && job.meta_info) && answers.first().is_some_and(has_payload) {
        sglext(&mut w, &voice.pattern, answers, false);
    }
    w.push("}");
    w.finish()
}

/// Opening event of a chat stream for one choice.
pub(crate) fn role_chunk(voice: &Voice, job: &Job, at: usize) -> Vec<Piece> {
    let mut w = Writer::default();
    w.push("data: ");
    head(&mut w, voice, job, "chat.completion.chunk");
    w.fmt(format_args!(
        r#","choices":[{{"index":{at},"delta":{{"reasoning_content":null,"role":"assistant","content":""}},"logprobs":null,"finish_reason":null,"matched_stop":null}}]}}"#
    ));
    w.push("\n\n");
    w.finish()
}

/// One event with the tokens after `sent`, of choice `at`.
pub(crate) fn delta_chunk(voice: &Voice, job: &Job, at: usize, answer: &Answer, sent: u32) -> Vec<Piece> {
    let mut w = Writer::default();
    let sub = &job.subs[at];
    let delta: String = (sent..answer.tokens).map(|i| token_text(output_id(sub.nonce, i))).collect();
    w.push("data: ");
    if job.api == Api::Chat {
        head(&mut w, voice, job, "chat.completion.chunk");
        w.fmt(format_args!(r#","choices":[{{"index":{at},"delta":{{"reasoning_content":null,"content":"#));
        w.json(&delta);
        w.push(r#"},"logprobs":"#);
        chat_logprobs(&mut w, job, sub, sent, answer.tokens);
        w.push(r#","finish_reason":null,"matched_stop":null}]}"#);
    } else {
        head(&mut w, voice, job, "text_completion");
        let echo =
            if job.echo && sent == 0 { job.prompts.get(at / job.n as usize).map_or("", String::as_str) } else { "" };
        w.fmt(format_args!(r#","choices":[{{"index":{at},"text":"#));
        w.json(&format!("{echo}{delta}"));
        w.push(r#","logprobs":"#);
        text_logprobs(&mut w, job, sub, answer, sent);
        w.fmt(format_args!(r#","finish_reason":{},"matched_stop":null}}],"usage":null}}"#, finish_name(answer)));
    }
    w.push("\n\n");
    w.finish()
}

/// What closes a stream after all choices ended: finish events (chat), the payload, usage.
pub(crate) fn tail_chunks(voice: &Voice, job: &Job, answers: &[Answer]) -> Vec<Piece> {
    let mut w = Writer::default();
    let chat = job.api == Api::Chat;
    let object = if chat { "chat.completion.chunk" } else { "text_completion" };
    if chat {
        for (at, answer) in answers.iter().enumerate() {
            w.push("data: ");
            head(&mut w, voice, job, object);
            w.fmt(format_args!(
                r#","choices":[{{"index":{at},"delta":{{"reasoning_content":null}},"logprobs":null,"finish_reason":{},"matched_stop":null}}]}}"#,
                finish_name(answer)
            ));
            w.push("\n\n");
        }
    }
    if answers.iter().any(|a| a.r3.is_some()) {
        w.push("data: ");
        head(&mut w, voice, job, object);
        w.push(r#","choices":[],"usage":null"#);
        sglext(&mut w, &voice.pattern, answers, true);
        w.push("}\n\n");
    }
    if job.include_usage {
        w.push("data: ");
        head(&mut w, voice, job, object);
        w.push(r#","choices":[],"usage":"#);
        usage(&mut w, voice, job, answers);
        w.push("}\n\n");
    }
    w.finish()
}
