//! The life of one attempt as the proxy leads it: bind, send prefill then decode, first end of a leg, account
//! (architecture section 3).
use r3router_core::admission::{Failure, Outcome, Permit};
use r3router_core::time::Moment;
use r3router_core::topology::{RankId, Role};

use crate::model::{EngineId, Finish};

/// One leg of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leg {
    Prefill,
    Decode,
}

/// What became of a leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LegState {
    #[default]
    Open,
    Answered,
    Failed,
}

/// A bound attempt.
pub(super) struct Attempt {
    pub(super) job: usize,
    pub(super) bound: Moment,
    pub(super) prefill: EngineId,
    pub(super) decode: EngineId,
    pub(super) prefill_rank: u16,
    pub(super) decode_rank: u16,
    pub(super) room: u64,
    pub(super) ranks: Option<(RankId, RankId)>,
    pub(super) rid: std::sync::Arc<str>,
    pub(super) permit: Option<Permit>,
    pub(super) legs: [LegState; 2],
    pub(super) delivered: bool,
    pub(super) first_token: Moment,
}

impl Attempt {
    pub(super) fn engine(&self, leg: Leg) -> EngineId {
        if leg == Leg::Prefill { self.prefill } else { self.decode }
    }

    pub(super) fn state(&mut self, leg: Leg) -> &mut LegState {
        &mut self.legs[leg as usize]
    }
}

impl Leg {
    pub(super) fn role(self) -> Role {
        if self == Self::Prefill { Role::Prefill } else { Role::Decode }
    }

    pub(super) fn other(self) -> Self {
        if self == Self::Prefill { Self::Decode } else { Self::Prefill }
    }
}

/// How the router reads an engine's refusal; `None` when the reply is good.
pub(super) fn outcome(leg: Leg, finish: Option<&Finish>) -> Option<Outcome> {
    let failed = |how| Some(Outcome::Failed { role: leg.role(), how });
    match finish {
        Some(Finish::Length) => None,
        None => failed(Failure::Reset),
        Some(Finish::Abort { status: 200, .. }) => Some(Outcome::Cancelled),
        Some(Finish::Abort { status: 400..=499, .. }) => Some(Outcome::Rejected),
        Some(Finish::Abort { status: 503, .. }) => failed(Failure::Overloaded),
        Some(Finish::Abort { message, .. }) if message.contains("mamba") => failed(Failure::Mamba),
        Some(Finish::Abort { message, .. })
            if message.contains("transfer failed") || message.contains("bootstrap failed") =>
        {
            failed(Failure::Transfer)
        }
        Some(Finish::Abort { .. }) => failed(Failure::Server),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_texts_are_read_as_the_failures_they_are() {
        let abort = |status, message: &str| Finish::Abort { status, message: message.to_owned() };
        let read = |finish: &Finish| outcome(Leg::Decode, Some(finish));
        assert_eq!(read(&Finish::Length), None);
        assert_eq!(read(&abort(400, "Input length")), Some(Outcome::Rejected));
        let failed = |how| Some(Outcome::Failed { role: Role::Decode, how });
        assert_eq!(read(&abort(500, "Decode transfer failed for request")), failed(Failure::Transfer));
        assert_eq!(read(&abort(503, "Retracted under decode memory pressure")), failed(Failure::Overloaded));
        assert_eq!(read(&abort(500, "Not enough space for mamba cache")), failed(Failure::Mamba));
        assert_eq!(outcome(Leg::Decode, None), failed(Failure::Reset));
    }
}
