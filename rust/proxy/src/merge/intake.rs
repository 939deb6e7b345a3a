//! One leg's reply as it comes in: small text aside, payloads decoded into the arena.
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::decode::{Decoder, NotBase64};
use r3router_core::r3::descriptor::{Descriptor, MAX_LEN, TEXT_PREFIX};
use r3router_core::r3::{Dtype, Extract, Name, Piece, Wanted};

use super::text::{Fault, Text};
use crate::store::{Arena, Charge, Draft, Rows};

/// A payload that has ended.
#[derive(Debug)]
pub(super) struct Payload {
    pub(super) name: Name,
    /// Where it was in the small text: just behind its opening quote.
    pub(super) at: usize,
    /// Its base64 text, bytes.
    pub(super) text: u64,
    /// Its bytes, before base64, those that were passed over included.
    pub(super) len: u64,
    /// Bytes of it before the first that is held.
    pub(super) from: u64,
    pub(super) held: Held,
    /// Bytes at its end that are no whole number.
    pub(super) tail: Vec<u8>,
    /// How its numbers are to be read.
    pub(super) wire: Dtype,
}

impl Payload {
    /// Reads the numbers as `declared`, what the reply says they are (int32 when it does not say); it may say so behind them.
    pub(super) fn settle(&mut self, declared: Option<Dtype>) -> Result<(), Error> {
        let declared = declared.unwrap_or(Dtype::I32);
        self.wire = declared;
        let draft = match &mut self.held {
            Held::Draft(draft) if declared != Dtype::I32 => draft.get_mut().take(),
            _ => None,
        };
        if let Some(draft) = draft {
            self.held = Held::Rows(Arc::new(draft.into_rows()?));
        }
        let Held::Rows(rows) = &mut self.held else { return Ok(()) };
        if rows.wire() == declared {
            return Ok(());
        }
        if let Some(old) = Arc::get_mut(rows) {
            *rows = Arc::new(old.reinterpret(declared, &self.tail)?);
            self.tail.clear();
        }
        Ok(())
    }
}

/// What is held of a payload.
#[derive(Debug)]
pub(super) enum Held {
    Rows(Arc<Rows>),
    /// They lie in the file of an object that is being made; taken out when it is finished.
    Draft(Mutex<Option<Draft>>),
    /// The text as it came.
    Text(Arc<Text>),
    /// It was a descriptor: the rows are somewhere else.
    Elsewhere(Descriptor),
}

/// How a payload is to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begin {
    /// Bytes to pass over by position.
    pub(super) skip: u64,
    /// When more bytes than this come behind `skip`, the engine did not obey its start: as many bytes as `surplus` more are given up.
    pub(super) limit: Option<u64>,
    pub(super) surplus: u64,
    pub(super) wire: Dtype,
    /// About how many numbers will be held, 0 when unknown.
    pub(super) hint: usize,
    /// Hold nothing at all: it will not be used.
    pub(super) discard: bool,
}

impl Default for Begin {
    fn default() -> Self {
        Self { skip: 0, limit: None, surplus: 0, wire: Dtype::I32, hint: 0, discard: false }
    }
}

/// How a payload is to be held while it comes in.
#[derive(Debug)]
pub(super) enum As {
    /// Narrow, in memory.
    Rows,
    /// As the text that comes; the charge is for it.
    Text(Charge),
    /// In an object's file.
    Draft(Draft),
}

/// Where numbers go.
#[derive(Debug)]
enum Place {
    Rows(Rows),
    Draft(Draft),
    /// Between the two.
    Nowhere,
}

impl Place {
    /// Whole numbers as they are on the wire.
    fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let taken = match self {
            Self::Rows(rows) => return rows.push(bytes),
            Self::Nowhere => return Ok(()),
            Self::Draft(draft) => draft.push(bytes)?,
        };
        if taken < bytes.len()
            && let Self::Draft(draft) = std::mem::replace(self, Self::Nowhere)
        {
            // A number that does not fit may be two narrow ones, which the reply says behind them.
            let mut rows = draft.into_rows()?;
            rows.push(&bytes[taken..])?;
            *self = Self::Rows(rows);
        }
        Ok(())
    }
}

/// Where bytes of a payload go.
#[derive(Debug)]
struct Sink {
    into: Place,
    /// Bytes that are no whole number yet.
    carry: [u8; 4],
    carried: usize,
    /// Bytes that came, and how many of them were given up.
    came: u64,
    given_up: u64,
    begin: Begin,
}

impl Sink {
    fn push(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.came += bytes.len() as u64;
        let size = self.begin.wire.size();
        if self.carried > 0 {
            let take = (size - self.carried).min(bytes.len());
            self.carry[self.carried..self.carried + take].copy_from_slice(&bytes[..take]);
            self.carried += take;
            bytes = &bytes[take..];
            if self.carried < size {
                return Ok(());
            }
            self.carried = 0;
            let number = self.carry;
            self.into.push(&number[..size])?;
        }
        let whole = bytes.len() / size * size;
        self.into.push(&bytes[..whole])?;
        self.carry[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
        self.carried = bytes.len() - whole;
        if self.begin.limit.is_some_and(|limit| self.came > limit)
            && let Place::Rows(rows) = &mut self.into
        {
            // Whatever came so far is from before the start that was asked for.
            let drop = (self.begin.surplus - self.given_up).min(rows.items() * size as u64) / size as u64;
            rows.discard_front(drop);
            self.given_up += drop * size as u64;
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Current {
    /// The first bytes of its text, until it is known what it is.
    Head(Vec<u8>, Begin, As),
    Rows(Decoder, Sink),
    Text(Vec<Bytes>, Charge),
    Descriptor(Vec<u8>),
}

/// What [`Intake::feed`] stopped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fed {
    /// The input is used up.
    All,
    /// A payload starts: call [`Intake::begin`], then feed on.
    Opened(Name),
}

/// A reply that comes in.
#[derive(Debug)]
pub(super) struct Intake {
    arena: Arena,
    source: Source,
    worker: Arc<str>,
    extract: Extract,
    wanted: Wanted,
    pub(super) text: Vec<u8>,
    pub(super) payloads: Vec<Payload>,
    current: Option<(Name, usize, u64, Current)>,
    /// Bytes of the reply so far.
    pub(super) bytes: u64,
}

impl Intake {
    pub(super) fn new(wanted: Wanted, source: Source, worker: Arc<str>, arena: &Arena) -> Self {
        Self {
            arena: arena.clone(),
            source,
            worker,
            extract: Extract::new(wanted),
            wanted,
            text: Vec::new(),
            payloads: Vec::new(),
            current: None,
            bytes: 0,
        }
    }

    /// Starts on the next JSON value of a stream; the text goes on.
    pub(super) fn restart(&mut self) {
        self.extract = Extract::new(self.wanted);
    }

    /// Whether the JSON value is whole.
    pub(super) fn complete(&self) -> bool {
        self.extract.complete()
    }

    /// Takes in as much of `input`, a part of `chunk`, as it can.
    pub(super) fn feed(&mut self, chunk: &Bytes, input: &mut &[u8]) -> Result<Fed, Error> {
        let before = input.len();
        while let Some(piece) = self.extract.step(input) {
            match piece {
                Piece::Text(text) => self.text.extend_from_slice(text),
                Piece::Open(name) => {
                    self.bytes += (before - input.len()) as u64;
                    return Ok(Fed::Opened(name));
                }
                Piece::Payload(text) => self.payload(chunk, text)?,
                Piece::Close => self.close()?,
            }
        }
        self.bytes += (before - input.len()) as u64;
        Ok(Fed::All)
    }

    /// Says how the payload that has just started is to be read, and how it is to be held.
    pub(super) fn begin(&mut self, name: Name, begin: Begin, held: As) {
        self.current = Some((name, self.text.len(), 0, Current::Head(Vec::new(), begin, held)));
    }

    fn fault(&self, e: Error) -> Error {
        if self.worker.is_empty() { e } else { e.at_worker(&*self.worker) }
    }

    fn not_base64(&self, name: Name, at: u64) -> Error {
        let mut e =
            Error::new(Kind::R3Mismatch, self.source, format!("{} is not base64, near byte {at} of it", name.key()));
        e.measured = Some(at as f64);
        self.fault(e)
    }

    fn payload(&mut self, chunk: &Bytes, mut text: &[u8]) -> Result<(), Error> {
        let Some((name, _, seen, current)) = &mut self.current else { return Ok(()) };
        let name = *name;
        *seen += text.len() as u64;
        if let Current::Head(head, begin, held) = current {
            let take = (TEXT_PREFIX.len() - head.len()).min(text.len());
            head.extend_from_slice(&text[..take]);
            text = &text[take..];
            if head.len() < TEXT_PREFIX.len() {
                return Ok(());
            }
            let (head, begin, held) = (std::mem::take(head), *begin, std::mem::replace(held, As::Rows));
            match held {
                _ if head == TEXT_PREFIX => *current = Current::Descriptor(head),
                As::Text(charge) => *current = Current::Text(vec![Bytes::from(head)], charge),
                held => {
                    *current = start(&self.arena, begin, held);
                    self.rows(name, &head)?;
                }
            }
        }
        match &mut self.current {
            Some((_, _, _, Current::Descriptor(all))) => {
                if all.len() + text.len() > MAX_LEN / 3 * 4 + 4 {
                    let e = Error::new(Kind::R3Mismatch, self.source, "the R3 descriptor is too long")
                        .with_limit(MAX_LEN as f64, (all.len() + text.len()) as f64);
                    return Err(self.fault(e));
                }
                all.extend_from_slice(text);
                Ok(())
            }
            Some((_, _, _, Current::Rows(..))) => self.rows(name, text),
            Some((_, _, _, Current::Text(chunks, _))) => {
                if !text.is_empty() {
                    chunks.push(chunk.slice_ref(text));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn rows(&mut self, name: Name, text: &[u8]) -> Result<(), Error> {
        let Some((_, _, _, Current::Rows(decoder, sink))) = &mut self.current else { return Ok(()) };
        let pushed = decoder.push(text, |bytes| sink.push(bytes).map_err(Fault::Arena));
        pushed.map_err(|fault| match fault {
            Fault::Text(NotBase64(at)) => self.not_base64(name, at),
            Fault::Arena(e) => e,
        })
    }

    fn close(&mut self) -> Result<(), Error> {
        if let Some((name, _, _, Current::Head(head, begin, _))) = &mut self.current {
            // Shorter than any descriptor.
            let (name, head, begin) = (*name, std::mem::take(head), *begin);
            if let Some((_, _, _, current)) = &mut self.current {
                *current = start(&self.arena, begin, As::Rows);
            }
            self.rows(name, &head)?;
        }
        let Some((name, at, text, current)) = self.current.take() else { return Ok(()) };
        let mut tail = Vec::new();
        let (len, from, held) = match current {
            Current::Rows(decoder, sink) => {
                decoder.finish().map_err(|NotBase64(at)| self.not_base64(name, at))?;
                tail.extend_from_slice(&sink.carry[..sink.carried]);
                let held = match sink.into {
                    Place::Rows(rows) => Held::Rows(Arc::new(rows)),
                    Place::Draft(draft) => Held::Draft(Mutex::new(Some(draft))),
                    Place::Nowhere => Held::Rows(Arc::new(Rows::new(&self.arena, sink.begin.wire, 0))),
                };
                (decoder.bytes(), sink.begin.skip + sink.given_up, held)
            }
            Current::Text(chunks, charge) => {
                let text = Text::new(chunks, charge).map_err(|NotBase64(at)| self.not_base64(name, at))?;
                (text.bytes(), 0, Held::Text(Arc::new(text)))
            }
            Current::Descriptor(text) => {
                let bytes = base64_simd::STANDARD.decode_to_vec(&text).map_err(|_| self.not_base64(name, 0))?;
                let mut descriptor = Descriptor::decode(&bytes).map_err(|mut e| {
                    e.source = self.source;
                    self.fault(e)
                })?;
                let row = u64::from(descriptor.layers) * u64::from(descriptor.top_k) * descriptor.dtype.size() as u64;
                descriptor.uri.shrink_to_fit();
                (u64::from(descriptor.rows) * row, 0, Held::Elsewhere(descriptor))
            }
            Current::Head(..) => return Ok(()),
        };
        let wire = match &held {
            Held::Rows(rows) => rows.wire(),
            _ => Dtype::I32,
        };
        self.payloads.push(Payload { name, at, text, len, from, held, tail, wire });
        Ok(())
    }

    /// The text so far, which starts anew; offsets of payloads count from the same point.
    pub(super) fn take_text(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.text))
    }
}

fn start(arena: &Arena, begin: Begin, held: As) -> Current {
    let mut decoder = Decoder::skipping(begin.skip);
    if begin.discard {
        decoder.skip_rest();
    }
    let into = match held {
        As::Draft(draft) if begin.wire == Dtype::I32 && begin.limit.is_none() => Place::Draft(draft),
        _ => Place::Rows(Rows::new(arena, begin.wire, begin.hint)),
    };
    Current::Rows(decoder, Sink { into, carry: [0; 4], carried: 0, came: 0, given_up: 0, begin })
}
