//! Where in a reply payloads and log-probabilities stand, so that both legs' can be matched.
use r3router_core::r3::Name;
use r3router_core::r3::outline::{Element, Member, Meta, Outline};
use r3router_core::wire::Route;

use super::intake::Payload;

/// A place in a reply object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// `meta_info`.
    Meta,
    /// `choices[i].meta_info`.
    Choice(usize),
    /// `sglext`.
    Ext,
}

impl Place {
    /// The object at this place.
    pub(super) fn of(self, e: &Element) -> Option<&Meta> {
        match self {
            Self::Meta => e.meta.as_ref(),
            Self::Choice(i) => e.choices.get(i).and_then(|c| c.meta.as_ref()),
            Self::Ext => e.sglext.as_ref(),
        }
    }

    /// Every place that `e` has.
    pub(super) fn all(e: &Element) -> impl Iterator<Item = Self> {
        let choices = (0..e.choices.len()).map(Self::Choice);
        std::iter::once(Self::Meta).chain(choices).chain([Self::Ext]).filter(|p| p.of(e).is_some())
    }

    /// Where the engine puts a payload of this reply.
    pub(super) fn expected(route: Route, e: &Element) -> Self {
        match route {
            Route::Generate => Self::Meta,
            _ if e.choices.first().is_some_and(|c| c.meta.is_some()) => Self::Choice(0),
            _ => Self::Ext,
        }
    }
}

/// The payload that the member holds.
pub(super) fn payload(payloads: &[Payload], name: Name, member: Option<Member>) -> Option<&Payload> {
    let at = member?.value.start + 1;
    payloads.iter().find(|p| p.name == name && p.at == at)
}

/// Where the payload that starts at the end of the text so far stands: its object's number and its place in it.
pub(super) fn opened(outline: &Outline, name: Name, at: usize) -> Option<(usize, Place)> {
    let last = outline.elements.len().checked_sub(1)?;
    let e = &outline.elements[last];
    let found = Place::all(e).find(|p| {
        let member = p.of(e).and_then(|m| m.payload(name));
        member.is_some_and(|m| m.value.start + 1 == at)
    })?;
    Some((last, found))
}
