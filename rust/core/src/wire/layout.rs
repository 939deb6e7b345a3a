//! Where in a body the fields are that a splice changes.
use smallvec::SmallVec;

use super::Span;

/// Found by the scan, used by every splice of the body.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Just behind the opening brace; the router's own fields go here.
    pub(crate) open: usize,
    /// Whether any member stays.
    pub(crate) kept: bool,
    /// What is taken out in every case: owned members with their commas.
    pub(crate) cuts: Vec<Span>,
    /// Value of `stream`.
    pub(crate) stream: Option<Span>,
    /// Value of `routed_experts_start_len`.
    pub(crate) start_len: Option<Span>,
    /// `stream_options`.
    pub(crate) stream_options: Option<StreamOptions>,
    /// Value of the top-level `n`.
    pub(crate) n: Option<Span>,
    /// `sampling_params`.
    pub(crate) sampling: Sampling,
    /// Fields with one element a prompt; only of a batch.
    pub(crate) lists: Vec<List>,
}

/// `stream_options`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    /// The value.
    pub(crate) value: Span,
    /// Value of `include_usage`.
    pub(crate) include_usage: Option<Span>,
    /// Whether it is an object, and if so whether it is empty.
    pub(crate) object: Option<bool>,
}

/// `sampling_params`.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    /// Value of `n`, in each element.
    pub(crate) n: SmallVec<[Option<Span>; 1]>,
    /// The list and its elements, when it is one.
    pub(crate) list: Option<(Span, Vec<Span>)>,
}

/// A field with one element a prompt.
#[derive(Debug)]
pub(crate) struct List {
    /// Its name.
    pub(crate) name: String,
    /// The whole list.
    pub(crate) value: Span,
    /// Its elements.
    pub(crate) elements: Vec<Span>,
}
