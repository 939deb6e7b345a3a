//! Where things are in a reply's small text (payloads taken out): the places that a merge or a join touches, and the counts that
//! it checks against.
use super::{Dtype, Name};
use crate::error::{Error, Kind, Source};
use crate::wire::Span;
use crate::wire::cursor::{Bad, Cursor, Text};

/// A member of an object: key with its quotes, and value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// The key, quotes included.
    pub key: Span,
    /// The value.
    pub value: Span,
}

/// A `meta_info` or `sglext` object.
#[derive(Clone, Debug, Default)]
pub struct Meta {
    /// The object.
    pub span: Span,
    /// Whether it has any member.
    pub filled: bool,
    /// `id`.
    pub id: Option<Span>,
    /// `routed_experts`, when it is there (null counts).
    pub routed_experts: Option<Member>,
    /// `indexer_topk`, when it is there.
    pub indexer_topk: Option<Member>,
    /// `output_ids` (of `sglext`).
    pub output_ids: Option<Span>,
    /// `routed_experts_dtype`.
    pub dtype: Option<Dtype>,
    /// Members with log-probabilities of the prompt: `input_*logprobs*`.
    pub inputs: Vec<Member>,
    /// `prompt_tokens`.
    pub prompt_tokens: Option<u32>,
    /// `completion_tokens`.
    pub completion_tokens: Option<u32>,
    /// `cached_tokens`.
    pub cached_tokens: Option<u32>,
    /// `num_retractions`.
    pub retractions: u32,
    /// `finish_reason` is there and not null.
    pub finished: bool,
    /// `finish_reason.type` is `abort`.
    pub aborted: bool,
}

impl Meta {
    /// The member of that payload.
    pub fn payload(&self, name: Name) -> Option<Member> {
        match name {
            Name::RoutedExperts => self.routed_experts,
            Name::IndexerTopk => self.indexer_topk,
        }
    }
}

/// One of `choices`.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// The object.
    pub span: Span,
    /// Value of `index`.
    pub index: Option<Span>,
    /// `meta_info`.
    pub meta: Option<Meta>,
    /// Members of `logprobs` that are lists, when it is an object.
    pub logprobs: Vec<Member>,
    /// `finish_reason` is `abort`.
    pub aborted: bool,
}

/// A number in `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The key of the object in `usage` that it is in, if it is in one.
    pub group: Option<Span>,
    /// Its key, without quotes.
    pub key: Span,
    /// Where it stands.
    pub value: Span,
    /// What it is.
    pub number: u64,
}

/// `usage`.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// The object.
    pub span: Span,
    /// `prompt_tokens`.
    pub prompt_tokens: Option<u32>,
    /// `completion_tokens`.
    pub completion_tokens: Option<u32>,
    /// Every whole number in it, one object deep.
    pub figures: Vec<Figure>,
}

/// One reply object.
#[derive(Clone, Debug, Default)]
pub struct Element {
    /// The object.
    pub span: Span,
    /// Whether it has any member.
    pub filled: bool,
    /// Value of `id`.
    pub id: Option<Span>,
    /// Value of `index`.
    pub index: Option<Span>,
    /// `meta_info`.
    pub meta: Option<Meta>,
    /// `sglext`.
    pub sglext: Option<Meta>,
    /// The whole member `sglext`.
    pub sglext_member: Option<Member>,
    /// The list `choices`.
    pub choices_span: Option<Span>,
    /// Its objects.
    pub choices: Vec<Choice>,
    /// `usage`, when it is an object.
    pub usage: Option<Usage>,
    /// The whole member `usage`.
    pub usage_member: Option<Member>,
    /// There is a top-level `error`.
    pub error: bool,
}

impl Element {
    /// `prompt_tokens`, from wherever the reply says it.
    pub fn prompt_tokens(&self) -> Option<u32> {
        let usage = self.usage.as_ref().and_then(|u| u.prompt_tokens);
        self.metas().find_map(|m| m.prompt_tokens).or(usage)
    }

    /// `completion_tokens`, from wherever the reply says it.
    pub fn completion_tokens(&self) -> Option<u32> {
        let usage = self.usage.as_ref().and_then(|u| u.completion_tokens);
        self.metas().find_map(|m| m.completion_tokens).or(usage)
    }

    /// Whether the engine ended it as an abort.
    pub fn aborted(&self) -> bool {
        self.metas().any(|m| m.aborted) || self.choices.iter().any(|c| c.aborted)
    }

    /// Its `meta_info`, and those of its choices.
    pub fn metas(&self) -> impl Iterator<Item = &Meta> {
        self.meta.iter().chain(self.choices.iter().filter_map(|c| c.meta.as_ref()))
    }
}

/// A reply.
#[derive(Clone, Debug, Default)]
pub struct Outline {
    /// It is a list of objects.
    pub listed: bool,
    /// The objects; one when it is no list.
    pub elements: Vec<Element>,
}

impl Outline {
    /// Reads a whole reply.
    ///
    /// # Errors
    /// `EngineProtocol` from `source` when it is not JSON, or no object or list of objects.
    pub fn read(text: &[u8], source: Source) -> Result<Self, Error> {
        let mut outline = Self::default();
        let mut c = Cursor::new(text);
        let read = outline
            .fill(&mut c)
            .and_then(|()| if c.pos == text.len() { Ok(()) } else { c.bad("something follows it") });
        match read {
            Ok(()) => Ok(outline),
            Err(bad) => {
                let why = format!(
                    "the engine's reply cannot be read: {}, near byte {} of it without its payloads",
                    bad.why, bad.at
                );
                let mut e = Error::new(Kind::EngineProtocol, source, why);
                e.measured = Some(bad.at as f64);
                Err(e)
            }
        }
    }

    /// Reads as much as there is of a reply that has not ended.
    pub fn so_far(text: &[u8]) -> Self {
        let mut outline = Self::default();
        // It ends in the middle of something; what was seen before that stays.
        let _ = outline.fill(&mut Cursor::new(text));
        outline
    }

    fn fill(&mut self, c: &mut Cursor<'_>) -> Result<(), Bad> {
        c.space();
        match c.peek() {
            Some(b'{') => self.element(c)?,
            Some(b'[') => {
                self.listed = true;
                c.list(|c| self.element(c))?;
            }
            _ => return c.bad("a JSON object was expected"),
        }
        c.space();
        Ok(())
    }

    fn element(&mut self, c: &mut Cursor<'_>) -> Result<(), Bad> {
        self.elements.push(Element::default());
        let Some(e) = self.elements.last_mut() else { return Ok(()) };
        e.span.start = c.pos;
        e.span = c.object(|c, key, at| {
            e.filled = true;
            match name(c, key) {
                b"meta_info" => object(c, at, |c, _| meta(c, e.meta.insert(Meta::default())))?,
                b"sglext" => object(c, at, |c, key| {
                    meta(c, e.sglext.insert(Meta::default()))?;
                    e.sglext_member = Some(Member { key, value: Span { start: key.end, end: c.pos } });
                    Ok(())
                })?,
                b"choices" if c.peek() == Some(b'[') => {
                    e.choices_span = Some(Span { start: c.pos, end: c.pos });
                    e.choices_span = Some(c.list(|c| {
                        e.choices.push(Choice::default());
                        e.choices.last_mut().map_or(Ok(()), |choice| self::choice(c, choice))
                    })?);
                }
                b"usage" => object(c, at, |c, key| {
                    usage(c, e.usage.insert(Usage::default()))?;
                    e.usage_member = Some(Member { key, value: Span { start: key.end, end: c.pos } });
                    Ok(())
                })?,
                b"id" => e.id = Some(c.value()?),
                b"index" => e.index = Some(c.value()?),
                b"error" => e.error |= !null(c)?,
                _ => {
                    c.value()?;
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// The elements of the list at `list` in `text`; empty when there is none.
pub fn elements(text: &[u8], list: Span) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut c = Cursor { bytes: &text[..list.end], pos: list.start };
    let read = c.list::<Bad>(|c| {
        spans.push(c.value()?);
        Ok(())
    });
    if read.is_ok() { spans } else { Vec::new() }
}

fn name<'a>(c: &Cursor<'a>, key: Text) -> &'a [u8] {
    &c.bytes[key.span.start..key.span.end]
}

/// Reads a value by `read` if it is an object, else passes over it.
fn object(
    c: &mut Cursor<'_>,
    key_start: usize,
    read: impl FnOnce(&mut Cursor<'_>, Span) -> Result<(), Bad>,
) -> Result<(), Bad> {
    if c.peek() == Some(b'{') {
        return read(c, Span { start: key_start, end: c.pos });
    }
    c.value()?;
    Ok(())
}

fn null(c: &mut Cursor<'_>) -> Result<bool, Bad> {
    let span = c.value()?;
    Ok(&c.bytes[span.start..span.end] == b"null")
}

fn number(c: &mut Cursor<'_>) -> Result<Option<u32>, Bad> {
    let span = c.value()?;
    Ok(whole(&c.bytes[span.start..span.end]).and_then(|n| u32::try_from(n).ok()))
}

fn whole(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn is_abort(c: &Cursor<'_>, span: Span) -> bool {
    &c.bytes[span.start..span.end] == br#""abort""#
}

fn meta(c: &mut Cursor<'_>, m: &mut Meta) -> Result<(), Bad> {
    m.span = Span { start: c.pos, end: c.pos };
    m.span = c.object(|c, key, at| {
        m.filled = true;
        let member = |value: Span| Member { key: Span { start: at, end: key.span.end + 1 }, value };
        match name(c, key) {
            b"routed_experts" => {
                // Known as soon as it starts, for a reply that has not ended.
                m.routed_experts = Some(member(Span { start: c.pos, end: c.pos }));
                m.routed_experts = Some(member(c.value()?));
            }
            b"indexer_topk" => {
                m.indexer_topk = Some(member(Span { start: c.pos, end: c.pos }));
                m.indexer_topk = Some(member(c.value()?));
            }
            b"routed_experts_dtype" => {
                let span = c.value()?;
                let text = c.bytes.get(span.start + 1..span.end - 1).and_then(|t| std::str::from_utf8(t).ok());
                m.dtype = text.and_then(Dtype::of);
                if m.dtype.is_none() && &c.bytes[span.start..span.end] != b"null" {
                    return Err(Bad { at: span.start, why: "routed_experts_dtype is none of uint8, uint16, int32" });
                }
            }
            b"id" => m.id = Some(c.value()?),
            b"output_ids" => m.output_ids = Some(c.value()?),
            b"prompt_tokens" => m.prompt_tokens = number(c)?,
            b"completion_tokens" => m.completion_tokens = number(c)?,
            b"cached_tokens" => m.cached_tokens = number(c)?,
            b"num_retractions" => m.retractions = number(c)?.unwrap_or(0),
            b"finish_reason" if c.peek() == Some(b'{') => {
                m.finished = true;
                c.object(|c, key, _| {
                    let is_type = name(c, key) == b"type";
                    let span = c.value()?;
                    m.aborted |= is_type && is_abort(c, span);
                    Ok(())
                })?;
            }
            b"finish_reason" => {
                let span = c.value()?;
                m.finished = &c.bytes[span.start..span.end] != b"null";
                m.aborted = is_abort(c, span);
            }
            key if key.starts_with(b"input_") && key.windows(8).any(|w| w == b"logprobs") => {
                let value = c.value()?;
                m.inputs.push(member(value));
            }
            _ => {
                c.value()?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

fn choice(c: &mut Cursor<'_>, choice: &mut Choice) -> Result<(), Bad> {
    choice.span.start = c.pos;
    choice.span = c.object(|c, key, at| {
        match name(c, key) {
            b"index" => choice.index = Some(c.value()?),
            b"meta_info" => object(c, at, |c, _| meta(c, choice.meta.insert(Meta::default())))?,
            b"logprobs" => object(c, at, |c, _| {
                c.object(|c, key, at| {
                    let list = c.peek() == Some(b'[');
                    let value = c.value()?;
                    if list {
                        choice.logprobs.push(Member { key: Span { start: at, end: key.span.end + 1 }, value });
                    }
                    Ok(())
                })?;
                Ok(())
            })?,
            b"finish_reason" => {
                let span = c.value()?;
                choice.aborted = is_abort(c, span);
            }
            _ => {
                c.value()?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

fn usage(c: &mut Cursor<'_>, u: &mut Usage) -> Result<(), Bad> {
    u.span = Span { start: c.pos, end: c.pos };
    u.span = c.object(|c, key, _| {
        let mut figure = |c: &Cursor<'_>, group: Option<Span>, key: Text, value: Span| {
            if let Some(number) = whole(&c.bytes[value.start..value.end]) {
                u.figures.push(Figure { group, key: key.span, value, number });
            }
        };
        if c.peek() == Some(b'{') {
            let group = key.span;
            c.object(|c, key, _| {
                let value = c.value()?;
                figure(c, Some(group), key, value);
                Ok(())
            })?;
            return Ok(());
        }
        let value = c.value()?;
        figure(c, None, key, value);
        let number = whole(&c.bytes[value.start..value.end]).and_then(|n| u32::try_from(n).ok());
        match name(c, key) {
            b"prompt_tokens" => u.prompt_tokens = number,
            b"completion_tokens" => u.completion_tokens = number,
            _ => {}
        }
        Ok(())
    })?;
    Ok(())
}
