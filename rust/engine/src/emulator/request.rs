//! The request bodies as an engine reads them: the fields that SGLang acts on, in every form that it takes them in; anything
//! else is ignored, as the engine ignores it. One body becomes one [`Job`] of one or more [`Sub`]s.
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};

use super::pattern::{mix, nonce_of_ids, nonce_of_text};

/// `max_new_tokens` of `/generate` when the client names none.
const DEFAULT_MAX_NEW_TOKENS: u32 = 128;
/// `max_tokens` of `/v1/completions` when the client names none.
const DEFAULT_COMPLETION_TOKENS: u32 = 16;
/// Characters that this engine counts as one token.
const CHARS_PER_TOKEN: usize = 4;

/// Which API a body came by; it decides the shape of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/generate`.
    Generate,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// A value that may come once or as a list, one per prompt.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Many<T> {
    List(Vec<T>),
    One(T),
}

impl<T> Many<T> {
    fn get(&self, index: usize) -> Option<&T> {
        match self {
            Self::List(list) => list.get(index),
            Self::One(value) => Some(value),
        }
    }
}

/// Token ids of one prompt or of several.
#[derive(Clone, Debug, Default)]
struct Ids {
    prompts: Vec<Vec<u32>>,
    batch: bool,
}

/// A string, several, or token ids: `prompt` of `/v1/completions`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Ids),
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Outer;
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Item {
            Id(u32),
            Prompt(Vec<u32>),
        }
        impl<'de> Visitor<'de> for Outer {
            type Value = Ids;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of token ids, or a list of such lists")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                let mut out = Ids::default();
                match seq.next_element::<Item>()? {
                    None => out.prompts.push(Vec::new()),
                    Some(Item::Id(first)) => {
                        let mut ids = vec![first];
                        while let Some(id) = seq.next_element::<u32>()? {
                            ids.push(id);
                        }
                        out.prompts.push(ids);
                    }
                    Some(Item::Prompt(first)) => {
                        out.batch = true;
                        out.prompts.push(first);
                        while let Some(prompt) = seq.next_element::<Vec<u32>>()? {
                            out.prompts.push(prompt);
                        }
                    }
                }
                Ok(out)
            }
        }
        deserializer.deserialize_seq(Outer)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Custom {
    r3_nonce: Option<u64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Sampling {
    max_new_tokens: Option<u32>,
    n: Option<u32>,
    custom_params: Option<Custom>,
}

#[derive(Debug, Deserialize)]
struct Message {
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    text: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// `logprobs`: a flag in chat, a number in completions.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Logprobs {
    Flag(bool),
    Number(u32),
}

/// Every field of the three routes that this engine reads.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Wire {
    rid: Option<Many<String>>,
    stream: Option<bool>,
    bootstrap_host: Option<Many<Option<String>>>,
    bootstrap_port: Option<Many<Option<u16>>>,
    bootstrap_room: Option<Many<Option<u64>>>,
    routed_dp_rank: Option<i64>,
    data_parallel_rank: Option<i64>,
    disagg_prefill_dp_rank: Option<i64>,
    return_routed_experts: Option<bool>,
    routed_experts_start_len: Option<i64>,
    // /generate
    text: Option<Many<String>>,
    input_ids: Option<Ids>,
    sampling_params: Option<Many<Sampling>>,
    return_logprob: Option<Many<bool>>,
    logprob_start_len: Option<Many<i64>>,
    top_logprobs_num: Option<Many<u32>>,
    token_ids_logprob: Option<Vec<u32>>,
    // OpenAI
    model: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<Prompt>,
    n: Option<u32>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<u32>,
    echo: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_meta_info: Option<bool>,
    custom_params: Option<Custom>,
}

/// One generation that the engine runs.
#[derive(Clone, Debug)]
pub struct Sub {
    /// Request id; made up when the client named none.
    pub rid: String,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// The prompt's ids, empty for texts.
    pub ids: Vec<u32>,
    /// What R3 rows, output ids and logprobs are derived from: `sampling_params.custom_params.r3_nonce` (chat and completions:
    /// `custom_params.r3_nonce`), else the prompt's last eight ids, else its text.
    pub nonce: u64,
    /// Tokens to generate, at least 1.
    pub max_new_tokens: u32,
    /// Room of the pair.
    pub room: Option<u64>,
    /// Where decode finds the prefill side: bootstrap host and port.
    pub bootstrap: Option<(String, u16)>,
}

/// One body.
#[derive(Clone, Debug)]
pub struct Job {
    /// The route.
    pub api: Api,
    /// Its generations, in the order of the reply.
    pub subs: Vec<Sub>,
    /// Whether `/generate` answers with a list.
    pub list: bool,
    /// SSE.
    pub stream: bool,
    /// Rank that the sender chose on this engine.
    pub rank: Option<i64>,
    /// Rank of the prefill side, where the sender names it.
    pub prefill_rank: Option<i64>,
    /// `return_routed_experts`.
    pub routed_experts: bool,
    /// `routed_experts_start_len`.
    pub start_len: i64,
    /// `return_logprob`, or `logprobs` of the OpenAI routes.
    pub logprobs: bool,
    /// First prompt position with an input logprob; negative for none.
    pub logprob_start: i64,
    /// `top_logprobs_num`.
    pub top_logprobs: u32,
    /// `token_ids_logprob`.
    pub token_ids_logprob: Option<Vec<u32>>,
    /// Chat's `return_meta_info`.
    pub meta_info: bool,
    /// Completions' `echo`.
    pub echo: bool,
    /// Texts to echo, one per prompt.
    pub prompts: Vec<String>,
    /// Choices per prompt.
    pub n: u32,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// Model name to answer with.
    pub model: Option<String>,
}

/// A prompt before it is expanded to `n` samples.
struct Source {
    ids: Vec<u32>,
    tokens: u32,
    nonce: u64,
}

impl Source {
    fn ids(ids: Vec<u32>) -> Self {
        Self { tokens: ids.len() as u32, nonce: nonce_of_ids(&ids), ids }
    }

    fn text(text: &str) -> Self {
        Self { ids: Vec::new(), tokens: text.len().div_ceil(CHARS_PER_TOKEN).max(1) as u32, nonce: nonce_of_text(text) }
    }
}

impl Job {
    /// Reads a body.
    ///
    /// # Errors
    /// The message that the engine answers 400 with.
    pub fn parse(api: Api, body: &[u8]) -> Result<Self, String> {
        let wire: Wire = serde_json::from_slice(body).map_err(|e| format!("body: {e}"))?;
        let (sources, batch, prompts) = sources(api, &wire)?;
        let sampling = |i: usize| wire.sampling_params.as_ref().and_then(|s| s.get(i));
        let n = if api == Api::Generate { sampling(0).and_then(|s| s.n) } else { wire.n }.unwrap_or(1);
        if n == 0 {
            return Err("n must be at least 1".to_owned());
        }
        let logprobs = match (api, &wire.logprobs) {
            (Api::Generate, _) => wire.return_logprob.as_ref().and_then(|v| v.get(0)).copied().unwrap_or(false),
            (_, Some(Logprobs::Flag(flag))) => *flag,
            (_, Some(Logprobs::Number(_))) => true,
            (_, None) => false,
        };
        let top = match (api, &wire.logprobs) {
            (Api::Generate, _) => wire.top_logprobs_num.as_ref().and_then(|v| v.get(0)).copied().unwrap_or(0),
            (Api::Completions, Some(Logprobs::Number(number))) => *number,
            _ => wire.top_logprobs.unwrap_or(0),
        };
        let echo = wire.echo.unwrap_or(false) && api == Api::Completions;
        let many = sources.len() > 1 || n > 1;
        let mut subs = Vec::with_capacity(sources.len() * n as usize);
        for (i, source) in sources.into_iter().enumerate() {
            let params = sampling(i);
            let custom = params.and_then(|s| s.custom_params.as_ref()).or(wire.custom_params.as_ref());
            let max_new_tokens = match api {
                Api::Generate => params.and_then(|s| s.max_new_tokens).unwrap_or(DEFAULT_MAX_NEW_TOKENS),
                Api::Chat => wire.max_completion_tokens.or(wire.max_tokens).unwrap_or(DEFAULT_MAX_NEW_TOKENS),
                Api::Completions => wire.max_tokens.unwrap_or(DEFAULT_COMPLETION_TOKENS),
            };
            for copy in 0..n as usize {
                let at = i * n as usize + copy;
                subs.push(Sub {
                    rid: rid(wire.rid.as_ref(), at, many),
                    prompt_tokens: source.tokens,
                    ids: source.ids.clone(),
                    nonce: custom.and_then(|c| c.r3_nonce).unwrap_or(source.nonce),
                    max_new_tokens: max_new_tokens.max(1),
                    room: room(wire.bootstrap_room.as_ref(), i, at),
                    bootstrap: bootstrap(&wire, i),
                });
            }
        }
        Ok(Self {
            api,
            list: batch || n > 1,
            subs,
            stream: wire.stream.unwrap_or(false),
            rank: wire.routed_dp_rank.or(wire.data_parallel_rank),
            prefill_rank: wire.disagg_prefill_dp_rank,
            routed_experts: wire.return_routed_experts.unwrap_or(false),
            start_len: wire.routed_experts_start_len.unwrap_or(0),
            logprobs,
            logprob_start: if echo {
                0
            } else {
                wire.logprob_start_len.as_ref().and_then(|v| v.get(0)).copied().unwrap_or(-1)
            },
            top_logprobs: top,
            token_ids_logprob: wire.token_ids_logprob,
            meta_info: wire.return_meta_info.unwrap_or(false),
            echo,
            prompts,
            n,
            include_usage: wire.stream_options.and_then(|o| o.include_usage).unwrap_or(false),
            model: wire.model,
        })
    }
}

fn sources(api: Api, wire: &Wire) -> Result<(Vec<Source>, bool, Vec<String>), String> {
    let texts = |list: &[String]| (list.iter().map(|t| Source::text(t)).collect::<Vec<_>>(), true, list.to_vec());
    let from_ids =
        |ids: &Ids| (ids.prompts.iter().cloned().map(Source::ids).collect::<Vec<_>>(), ids.batch, Vec::new());
    let found = match (api, &wire.text, &wire.input_ids, &wire.prompt, &wire.messages) {
        (Api::Generate, None, None, ..) => {
            return Err("Either text, input_ids or input_embeds should be provided.".to_owned());
        }
        (Api::Generate | Api::Chat, _, Some(ids), ..) | (Api::Completions, _, _, Some(Prompt::Ids(ids)), _) => {
            from_ids(ids)
        }
        (Api::Generate, Some(Many::List(list)), ..) | (Api::Completions, _, _, Some(Prompt::Texts(list)), _) => {
            texts(list)
        }
        (Api::Generate, Some(Many::One(text)), ..) | (Api::Completions, _, _, Some(Prompt::Text(text)), _) => {
            (vec![Source::text(text)], false, vec![text.clone()])
        }
        (Api::Completions, ..) => return Err("1 validation error:\n  Field required: prompt".to_owned()),
        (Api::Chat, _, _, _, None) => return Err("1 validation error:\n  Field required: messages".to_owned()),
        (Api::Chat, _, _, _, Some(messages)) if messages.is_empty() => {
            return Err("Messages cannot be empty.".to_owned());
        }
        (Api::Chat, _, _, _, Some(messages)) => {
            let mut text = String::new();
            for content in messages.iter().filter_map(|m| m.content.as_ref()) {
                match content {
                    Content::Text(t) => text.push_str(t),
                    Content::Parts(parts) => {
                        text.extend(parts.iter().filter_map(|p| p.text.as_deref()));
                    }
                }
            }
            (vec![Source::text(&text)], false, Vec::new())
        }
    };
    if found.0.is_empty() || found.0.iter().any(|s| s.tokens == 0) {
        return Err("The prompt is empty; input_ids must hold at least one token.".to_owned());
    }
    Ok(found)
}

/// A scalar room grows by one per generation, a list is repeated per sample: the engine's own trap for `n > 1`.
fn room(rooms: Option<&Many<Option<u64>>>, prompt: usize, at: usize) -> Option<u64> {
    match rooms? {
        Many::One(room) => room.map(|r| r + at as u64),
        Many::List(list) => list.get(prompt).copied().flatten(),
    }
}

fn bootstrap(wire: &Wire, index: usize) -> Option<(String, u16)> {
    let host = wire.bootstrap_host.as_ref()?.get(index)?.clone()?;
    let port = wire.bootstrap_port.as_ref().and_then(|p| p.get(index).copied().flatten()).unwrap_or(8998);
    Some((host, port))
}

fn rid(given: Option<&Many<String>>, at: usize, many: bool) -> String {
    match given {
        Some(Many::List(list)) if at < list.len() => list[at].clone(),
        Some(Many::One(rid)) if many => format!("{rid}_{at}"),
        Some(Many::One(rid)) => rid.clone(),
        _ => {
            format!("{:016x}{:016x}", rand::random::<u64>(), mix(rand::random::<u64>()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generate(body: &str) -> Job {
        Job::parse(Api::Generate, body.as_bytes()).unwrap()
    }

    #[test]
    fn input_ids_come_alone_or_as_a_batch() {
        let one = generate(r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":4},"unknown":{"a":[1]}}"#);
        assert_eq!((one.subs.len(), one.list, one.subs[0].prompt_tokens, one.subs[0].max_new_tokens), (1, false, 3, 4));
        let two = generate(
            r#"{"input_ids":[[1,2],[3]],"sampling_params":[{"max_new_tokens":4},{"max_new_tokens":5}],"rid":["a","b"]}"#,
        );
        assert!(two.list);
        assert_eq!(
            two.subs.iter().map(|s| (s.prompt_tokens, s.max_new_tokens, s.rid.as_str())).collect::<Vec<_>>(),
            [(2, 4, "a"), (1, 5, "b")]
        );
        let batch_of_one = generate(r#"{"input_ids":[[1,2]]}"#);
        assert!(batch_of_one.list);
    }

    #[test]
    fn a_scalar_room_counts_up_and_a_list_repeats_for_samples() {
        let scalar = generate(
            r#"{"input_ids":[1],"bootstrap_room":40,"bootstrap_host":"h","bootstrap_port":9,"sampling_params":{"n":3}}"#,
        );
        assert_eq!(scalar.subs.iter().map(|s| s.room.unwrap()).collect::<Vec<_>>(), [40, 41, 42]);
        assert_eq!(scalar.subs[2].bootstrap, Some(("h".to_owned(), 9)));
        let list = generate(r#"{"input_ids":[[1],[2]],"bootstrap_room":[7,8],"sampling_params":{"n":2}}"#);
        assert_eq!(list.subs.iter().map(|s| s.room.unwrap()).collect::<Vec<_>>(), [7, 7, 8, 8]);
    }

    #[test]
    fn the_nonce_comes_from_the_client_and_not_from_the_rid() {
        let a = generate(r#"{"input_ids":[5,6,7],"rid":"x"}"#).subs[0].nonce;
        let b = generate(r#"{"input_ids":[5,6,7],"rid":"y"}"#).subs[0].nonce;
        assert_eq!(a, b);
        assert_eq!(a, nonce_of_ids(&[5, 6, 7]));
        assert_ne!(a, generate(r#"{"input_ids":[5,6,8]}"#).subs[0].nonce);
        assert_eq!(generate(r#"{"text":"hi","sampling_params":{"custom_params":{"r3_nonce":9}}}"#).subs[0].nonce, 9);
        let chat = Job::parse(
            Api::Chat,
            br#"{"messages":[{"role":"user","content":"ab"},{"role":"user","content":[{"type":"text","text":"cd"}]}]}"#,
        )
        .unwrap();
        assert_eq!(chat.subs[0].nonce, nonce_of_text("abcd"));
    }

    #[test]
    fn openai_bodies_have_their_own_names() {
        let chat = Job::parse(Api::Chat, br#"{"model":"m","messages":[{"content":"x"}],"max_tokens":7,"n":2,"logprobs":true,"stream":true,"stream_options":{"include_usage":true},"routed_dp_rank":3}"#).unwrap();
        assert_eq!(
            (chat.subs.len(), chat.subs[0].max_new_tokens, chat.logprobs, chat.stream, chat.include_usage, chat.rank),
            (2, 7, true, true, true, Some(3))
        );
        assert_eq!(chat.subs[0].rid.len(), 32);
        let text =
            Job::parse(Api::Completions, br#"{"model":"m","prompt":["a","b"],"echo":true,"logprobs":1}"#).unwrap();
        assert_eq!((text.subs.len(), text.subs[0].max_new_tokens, text.echo, text.logprobs), (2, 16, true, true));
        let ids = Job::parse(Api::Completions, br#"{"model":"m","prompt":[[1,2],[3]]}"#).unwrap();
        assert_eq!(ids.subs[1].prompt_tokens, 1);
    }

    #[test]
    fn unusable_bodies_are_named() {
        for (body, part) in
            [("{}", "input_ids"), (r#"{"input_ids":[]}"#, "empty"), (r#"{"input_ids":"a"}"#, "body"), ("{", "body")]
        {
            let message = Job::parse(Api::Generate, body.as_bytes()).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }
}
