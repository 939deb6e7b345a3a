//! One pass over a request body: what the router must know of it, and where the fields are that it changes.
use super::cursor::{Bad, Cursor};
use super::layout::{Layout, List, Sampling, StreamOptions};
use super::read::{
    Fault, Input, Params, any_flag, clip, count, embeds, fault, field, filled, flag, ids, params, string, texts,
};
use super::text::decode;
use super::{Facts, Prompt, PromptKind, Route, Span};
use crate::error::{Error, Kind, Source};

/// Single requests that one client request may be split into.
pub(super) const MAX_SUBS: usize = 65_536;
/// `sampling_params.max_new_tokens` when `/generate` names none (`SamplingParams` of SGLang).
const GENERATE_MAX_NEW_TOKENS: u32 = 128;
/// `max_tokens` when completions name none (`CompletionRequest` of SGLang).
const COMPLETIONS_MAX_TOKENS: u32 = 16;

/// Fields that are always taken out: the router's own, and what is for the router alone.
const OWNED: [&str; 9] = [
    "rid",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "return_outputs_via_store",
];

/// What a list in a field means (`GenerateReqInput._normalize_batch_inputs` and `__getitem__` of SGLang).
#[derive(Clone, Copy, PartialEq, Eq)]
enum PerPrompt {
    /// One element a prompt.
    List,
    /// One element a prompt; an empty list means none at all.
    ListOrEmpty,
    /// A list of lists has one element a prompt; a flat list is one value for all.
    Nested,
}

/// Whether `name` is a field that a batch spells once a prompt.
fn per_prompt(route: Route, name: &[u8]) -> Option<PerPrompt> {
    let common = match name {
        b"lora_path" | b"extra_key" | b"cache_salt" => Some(PerPrompt::List),
        _ => None,
    };
    if route == Route::Completions || common.is_some() {
        return common;
    }
    match name {
        b"video_data"
        | b"audio_data"
        | b"mm_hashes"
        | b"mm_content_hashes"
        | b"watermark"
        | b"return_logprob"
        | b"logprob_start_len"
        | b"top_logprobs_num"
        | b"return_sampling_mask"
        | b"sampling_logprobs_mode"
        | b"return_hidden_states"
        | b"lora_id"
        | b"custom_logit_processor"
        | b"kv_hints"
        | b"decode_tp_size"
        | b"positional_embed_overrides"
        | b"multi_item_delimiter_indices"
        | b"token_indices_to_pool" => Some(PerPrompt::List),
        b"image_data" | b"modalities" => Some(PerPrompt::ListOrEmpty),
        b"token_ids_logprob" => Some(PerPrompt::Nested),
        _ => None,
    }
}

#[derive(Default)]
struct Scan {
    layout: Layout,
    ids: Option<Input>,
    text: Option<Input>,
    embeds: Option<Input>,
    prompt: Option<Input>,
    prompt_ids: bool,
    messages: Option<Span>,
    params: Option<Vec<Params>>,
    params_list: Option<(Span, Vec<Span>)>,
    n: Option<(Span, u64)>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: bool,
    rids: Vec<String>,
    rid_list: bool,
    return_logprob: bool,
    completion_logprobs: bool,
    echo: bool,
    routed_experts: bool,
    routed_experts_start: u32,
    indexer_topk: bool,
    meta_info: bool,
    via_store: bool,
    include_usage: bool,
    model: Option<Span>,
    /// The prompt that the engine sees may be longer than the ids sent.
    grows: bool,
}

/// See [`super::scan`].
pub(super) fn scan(body: &[u8], route: Route) -> Result<Facts, Error> {
    let json = |at: usize, why: &str| {
        let mut e = Error::new(Kind::InvalidJson, Source::Client, format!("the body is not JSON: {why}, at byte {at}"));
        e.measured = Some(at as f64);
        e
    };
    if body.starts_with(b"\xef\xbb\xbf") {
        return Err(json(0, "it starts with a byte order mark").advise("send the JSON text without it"));
    }
    if let Err(e) = std::str::from_utf8(body) {
        return Err(json(e.valid_up_to(), "a byte is not UTF-8"));
    }
    let mut c = Cursor::new(body);
    let mut s = Scan::default();
    match s.body(&mut c, route) {
        Ok(()) => s.facts(route),
        Err(Fault::Json(bad)) => Err(json(bad.at, bad.why)),
        Err(Fault::Field(e)) => Err(*e),
    }
}

impl Scan {
    fn body(&mut self, c: &mut Cursor<'_>, route: Route) -> Result<(), Fault> {
        c.space();
        if c.peek() != Some(b'{') {
            c.value()?;
            end(c)?;
            return fault(b"body", "it must be a JSON object");
        }
        self.layout.open = c.pos + 1;
        // The comma behind the last member that stays. If one is left at the end, only owned members follow it.
        let mut last_comma = None;
        c.object::<Fault>(|c, key, at| {
            let name = decode(&c.bytes[key.span.start..key.span.end], key.escaped);
            let owned = OWNED.iter().any(|o| o.as_bytes() == &*name);
            match &*name {
                b"rid" => self.rid(c)?,
                b"return_outputs_via_store" => self.via_store = flag(c, &name)?.0,
                _ if owned => {
                    c.value()?;
                }
                _ => self.member(c, route, &name)?,
            }
            let end = c.pos;
            c.space();
            let comma = (c.peek() == Some(b',')).then_some(c.pos);
            if owned {
                self.layout.cuts.push(Span { start: at, end: comma.map_or(end, |c| c + 1) });
            } else {
                self.layout.kept = true;
                last_comma = comma;
            }
            Ok(())
        })?;
        self.layout.cuts.extend(last_comma.map(|at| Span { start: at, end: at + 1 }));
        Ok(end(c)?)
    }

    fn member(&mut self, c: &mut Cursor<'_>, route: Route, name: &[u8]) -> Result<(), Fault> {
        match name {
            b"stream" => {
                let (on, span) = flag(c, name)?;
                self.stream = on;
                self.layout.stream = Some(span);
            }
            b"stream_options" => self.stream_options(c)?,
            b"return_routed_experts" => self.routed_experts = flag(c, name)?.0,
            b"return_meta_info" => self.meta_info = flag(c, name)?.0,
            b"return_indexer_topk" => self.indexer_topk = flag(c, name)?.0,
            b"routed_experts_start_len" => {
                let (value, span) = count(c, name)?;
                self.routed_experts_start = value.map_or(0, clip);
                self.layout.start_len = Some(span);
            }
            b"model" => {
                let span = c.value()?;
                self.model = c.bytes[span.start..].starts_with(b"\"").then_some(span);
            }
            b"input_ids" if route != Route::Completions => self.ids = ids(c, name)?,
            b"text" if route == Route::Generate => self.text = texts(c, name)?,
            b"input_embeds" if route == Route::Generate => self.embeds = embeds(c)?,
            b"sampling_params" if route == Route::Generate => self.sampling(c)?,
            b"session_params" => self.grows |= filled(c)?,
            b"image_data" | b"video_data" | b"audio_data" => {
                let start = c.pos;
                self.grows |= filled(c)?;
                c.pos = start;
                self.list(c, route, name)?;
            }
            b"return_logprob" if route == Route::Generate => {
                let start = c.pos;
                self.return_logprob = any_flag(c, name)?;
                c.pos = start;
                self.list(c, route, name)?;
            }
            b"messages" if route == Route::Chat => {
                let span = c.value()?;
                self.messages = Some(span);
            }
            b"prompt" if route == Route::Completions => self.completion_prompt(c)?,
            b"n" if route != Route::Generate => {
                let (value, span) = count(c, name)?;
                self.n = value.map(|v| (span, v));
            }
            b"max_tokens" if route != Route::Generate => self.max_tokens = count(c, name)?.0.map(clip),
            b"max_completion_tokens" if route == Route::Chat => {
                self.max_completion_tokens = count(c, name)?.0.map(clip);
            }
            b"echo" if route == Route::Completions => self.echo = flag(c, name)?.0,
            b"logprobs" if route == Route::Completions => self.completion_logprobs = count(c, name)?.0.unwrap_or(0) > 0,
            _ => self.list(c, route, name)?,
        }
        Ok(())
    }

    /// A field that the router does not read, but that may have one element a prompt.
    fn list(&mut self, c: &mut Cursor<'_>, route: Route, name: &[u8]) -> Result<(), Fault> {
        let kind = if route == Route::Chat { None } else { per_prompt(route, name) };
        let (Some(kind), Some(b'[')) = (kind, c.peek()) else {
            c.value()?;
            return Ok(());
        };
        let mut elements = Vec::new();
        let mut nested = true;
        let span = c.list::<Fault>(|c| {
            nested &= c.peek() == Some(b'[');
            let element = c.value()?;
            if kind != PerPrompt::Nested || nested {
                elements.push(element);
            }
            Ok(())
        })?;
        if (kind == PerPrompt::Nested && !nested) || (elements.is_empty() && kind != PerPrompt::List) {
            return Ok(());
        }
        self.layout.lists.push(List { name: String::from_utf8_lossy(name).into_owned(), value: span, elements });
        Ok(())
    }

    fn rid(&mut self, c: &mut Cursor<'_>) -> Result<(), Fault> {
        let mut rids = Vec::new();
        let one = |c: &mut Cursor<'_>, rids: &mut Vec<String>| {
            if c.peek() == Some(b'"') {
                let text = c.string()?;
                rids.push(string(c, text).into_owned());
            } else {
                c.value()?;
            }
            Ok::<(), Fault>(())
        };
        self.rid_list = c.peek() == Some(b'[');
        if self.rid_list {
            c.list::<Fault>(|c| one(c, &mut rids))?;
        } else {
            one(c, &mut rids)?;
        }
        self.rids = rids;
        Ok(())
    }

    fn stream_options(&mut self, c: &mut Cursor<'_>) -> Result<(), Fault> {
        self.include_usage = false;
        if c.peek() != Some(b'{') {
            let value = c.value()?;
            if !c.bytes[value.start..].starts_with(b"null") {
                return fault(b"stream_options", "it must be an object");
            }
            self.layout.stream_options = Some(StreamOptions { value, include_usage: None, object: None });
            return Ok(());
        }
        let mut include = None;
        let mut members = 0;
        let value = c.object::<Fault>(|c, key, _| {
            members += 1;
            let name = decode(&c.bytes[key.span.start..key.span.end], key.escaped);
            if &*name == b"include_usage" {
                let (on, span) = flag(c, b"stream_options.include_usage")?;
                self.include_usage = on;
                include = Some(span);
            } else {
                c.value()?;
            }
            Ok(())
        })?;
        let object = Some(members == 0);
        self.layout.stream_options = Some(StreamOptions { value, include_usage: include, object });
        Ok(())
    }

    fn sampling(&mut self, c: &mut Cursor<'_>) -> Result<(), Fault> {
        self.params = None;
        self.params_list = None;
        match c.peek() {
            Some(b'{') => self.params = Some(vec![params(c)?]),
            Some(b'[') => {
                let (mut all, mut spans) = (Vec::new(), Vec::new());
                let span = c.list::<Fault>(|c| {
                    let start = c.pos;
                    if c.peek() == Some(b'{') {
                        all.push(params(c)?);
                    } else {
                        c.value()?;
                        return fault(b"sampling_params", "every element must be an object");
                    }
                    spans.push(Span { start, end: c.pos });
                    Ok(())
                })?;
                self.params = Some(all);
                self.params_list = Some((span, spans));
            }
            _ => {
                let span = c.value()?;
                if !c.bytes[span.start..].starts_with(b"null") {
                    return fault(b"sampling_params", "it must be an object or a list of objects");
                }
            }
        }
        Ok(())
    }

    fn completion_prompt(&mut self, c: &mut Cursor<'_>) -> Result<(), Fault> {
        let start = c.pos;
        self.prompt_ids = false;
        self.prompt = None;
        if c.peek() == Some(b'[') {
            c.pos += 1;
            c.space();
            let first = c.peek();
            c.pos = start;
            if first == Some(b']') {
                return fault(b"prompt", "it must not be empty");
            }
            if first != Some(b'"') {
                self.prompt_ids = true;
                self.prompt = ids(c, b"prompt")?;
                return Ok(());
            }
        }
        self.prompt = texts(c, b"prompt")?;
        Ok(())
    }

    fn facts(mut self, route: Route) -> Result<Facts, Error> {
        let (kind, input) = self.input(route)?;
        let batch = input.batch.as_ref().map(Vec::len);
        let count = batch.unwrap_or(1);
        let samples = self.samples(route)?;
        let subs = count as u64 * samples;
        if subs > MAX_SUBS as u64 {
            return Err(field(b"n", "prompts times samples are more than one request may ask for")
                .with_limit(MAX_SUBS as f64, subs as f64)
                .advise("send fewer prompts or samples in one request"));
        }
        self.per_prompt_lists(batch)?;
        let default = match route {
            Route::Generate => Some(GENERATE_MAX_NEW_TOKENS),
            Route::Chat => self.max_completion_tokens.filter(|n| *n > 0).or(self.max_tokens),
            Route::Completions => self.max_tokens.or(Some(COMPLETIONS_MAX_TOKENS)),
        };
        let params = self.params.take().unwrap_or_default();
        let exact = !self.grows;
        let prompt = |i: usize, span: Span, ids: u32| {
            let named = params.get(i).or(params.first().filter(|_| params.len() == 1)).and_then(|p| p.max_new_tokens);
            let ids = (kind == PromptKind::Ids).then_some(ids);
            Prompt { kind, span, ids, exact: exact && ids.is_some(), max_new_tokens: named.map_or(default, |l| l.0) }
        };
        let prompts = match input.batch {
            Some(list) => list.into_iter().enumerate().map(|(i, (span, ids))| prompt(i, span, ids)).collect(),
            None => vec![prompt(0, input.span, input.ids)],
        };
        let rids_fit = !self.rid_list || self.rids.len() == count;
        Ok(Facts {
            route,
            stream: self.stream,
            prompts,
            samples: u32::try_from(samples).unwrap_or(u32::MAX),
            listed: route == Route::Generate && (batch.is_some() || samples > 1),
            rids: if rids_fit { self.rids } else { Vec::new() },
            rid_list: self.rid_list,
            logprobs: match route {
                Route::Generate => self.return_logprob,
                Route::Chat => self.meta_info,
                Route::Completions => self.echo && self.completion_logprobs,
            },
            routed_experts: self.routed_experts,
            routed_experts_start: self.routed_experts_start,
            indexer_topk: self.indexer_topk,
            meta_info: self.meta_info,
            via_store: self.via_store,
            include_usage: self.include_usage,
            model: self.model,
            layout: std::sync::Arc::new(self.layout),
        })
    }

    /// The field that holds the prompts, with the engine's own precedence: `text` decides whether it is a batch, ids are what is run.
    fn input(&mut self, route: Route) -> Result<(PromptKind, Input), Error> {
        let empty = |name: &[u8]| field(name, "the batch is empty").advise("send at least one prompt");
        match route {
            Route::Generate => {
                if let (Some(text), Some(ids)) = (&self.text, &self.ids) {
                    let (a, b) = (text.batch.as_ref().map(Vec::len), ids.batch.as_ref().map(Vec::len));
                    if a != b {
                        let error = field(b"input_ids", "it must have as many prompts as text");
                        return Err(error.with_limit(a.unwrap_or(1) as f64, b.unwrap_or(1) as f64));
                    }
                }
                for (name, input) in
                    [(&b"text"[..], &self.text), (b"input_ids", &self.ids), (b"input_embeds", &self.embeds)]
                {
                    if input.as_ref().and_then(|i| i.batch.as_ref()).is_some_and(Vec::is_empty) {
                        return Err(empty(name));
                    }
                }
                let mut inputs = Vec::new();
                inputs.extend(self.embeds.take().map(|i| (PromptKind::Embeds, i)));
                inputs.extend(self.text.take().map(|i| (PromptKind::Text, i)));
                inputs.extend(self.ids.take().map(|i| (PromptKind::Ids, i)));
                for (kind, input) in &inputs {
                    if let Some(batch) = &input.batch {
                        let name = match kind {
                            PromptKind::Text => "text",
                            PromptKind::Ids => "input_ids",
                            _ => "input_embeds",
                        };
                        let elements = batch.iter().map(|(span, _)| *span).collect();
                        self.layout.lists.push(List { name: name.to_owned(), value: input.span, elements });
                    }
                }
                if let Some((PromptKind::Ids, ids)) = inputs.last()
                    && ids.batch.as_ref().map_or(ids.ids == 0, |batch| batch.iter().any(|(_, ids)| *ids == 0))
                    && !self.grows
                {
                    return Err(field(b"input_ids", "it must not be empty").advise("send at least one token id"));
                }
                Ok(inputs.pop().unwrap_or((PromptKind::Absent, Input::default())))
            }
            Route::Chat => match (self.ids.take(), self.messages) {
                (Some(ids), _) if ids.batch.is_some() => {
                    Err(field(b"input_ids", "chat takes one flat list of token ids"))
                }
                (Some(ids), _) => Ok((PromptKind::Ids, ids)),
                (None, Some(span)) => Ok((PromptKind::Messages, Input { span, ..Input::default() })),
                (None, None) => Ok((PromptKind::Absent, Input::default())),
            },
            Route::Completions => {
                let Some(input) = self.prompt.take() else { return Ok((PromptKind::Absent, Input::default())) };
                if let Some(batch) = &input.batch {
                    if batch.is_empty() {
                        return Err(empty(b"prompt"));
                    }
                    let elements = batch.iter().map(|(span, _)| *span).collect();
                    self.layout.lists.push(List { name: "prompt".to_owned(), value: input.span, elements });
                }
                Ok((if self.prompt_ids { PromptKind::Ids } else { PromptKind::Text }, input))
            }
        }
    }

    fn samples(&mut self, route: Route) -> Result<u64, Error> {
        let name: &[u8] = if route == Route::Generate { b"sampling_params.n" } else { b"n" };
        let mut samples = 1;
        if route == Route::Generate {
            let params = self.params.as_deref().unwrap_or_default();
            samples = params.first().and_then(|p| p.n).map_or(1, |(_, n)| n);
            if params.iter().any(|p| p.n.map_or(1, |(_, n)| n) != samples) {
                return Err(field(name, "it must be the same for all prompts"));
            }
            // With beams, n is the number of sequences that one request returns; nothing is split (`_handle_beam_search_parallel_sampling`).
            let beams = params.first().is_some_and(|p| p.beams > 1);
            if beams {
                samples = 1;
            }
            self.layout.sampling = Sampling {
                n: params.iter().map(|p| p.n.filter(|_| !beams).map(|(span, _)| span)).collect(),
                list: self.params_list.take(),
            };
        } else if let Some((span, n)) = self.n {
            samples = n;
            self.layout.n = Some(span);
        }
        if samples == 0 {
            return Err(field(name, "it must be at least 1").with_limit(1.0, 0.0));
        }
        Ok(samples)
    }

    /// Keeps the lists that a batch takes apart, and checks their lengths.
    fn per_prompt_lists(&mut self, batch: Option<usize>) -> Result<(), Error> {
        let wrong = |name: &[u8], prompts: usize, len: usize| {
            field(name, "a list must have one element a prompt").with_limit(prompts as f64, len as f64)
        };
        let params = self.layout.sampling.list.as_ref().map(|(_, elements)| elements.len());
        if let Some(len) = params.filter(|len| *len != batch.unwrap_or(1)) {
            return Err(wrong(b"sampling_params", batch.unwrap_or(1), len));
        }
        let Some(prompts) = batch else {
            self.layout.lists.clear();
            return Ok(());
        };
        // Of a field that is spelled twice the engine reads the last.
        let mut last = Vec::<List>::new();
        for list in std::mem::take(&mut self.layout.lists) {
            last.retain(|l| l.name != list.name);
            last.push(list);
        }
        for list in &last {
            if list.elements.len() != prompts {
                return Err(wrong(list.name.as_bytes(), prompts, list.elements.len()));
            }
        }
        self.layout.lists = last;
        Ok(())
    }
}

/// The rest must be white space.
fn end(c: &mut Cursor<'_>) -> Result<(), Bad> {
    c.space();
    if c.pos < c.bytes.len() { c.bad("nothing may follow the JSON value") } else { Ok(()) }
}
