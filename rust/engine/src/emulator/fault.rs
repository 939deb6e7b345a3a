//! Faults on demand: `POST /emulator/fault` on an engine's own port. What the HTTP layer does is done here; what the engine does
//! goes to the model.
use std::time::Duration;

use serde::Deserialize;

use crate::model::Fault;

/// A fault as it is asked for. `count` limits it to so many generate requests; left out, it lasts until `clear`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultRequest {
    /// Generate requests wait so long (real seconds) before the engine reads them.
    Delay {
        /// Real seconds.
        seconds: f64,
        /// Requests that it hits.
        count: Option<u64>,
    },
    /// Generate requests are answered with this status at once.
    Status {
        /// HTTP status.
        status: u16,
        /// Body; left out, SGLang's error object.
        body: Option<String>,
        /// Requests that it hits.
        count: Option<u64>,
    },
    /// The connection is reset, before the reply or after so many bytes of its body.
    Reset {
        /// Body bytes that still leave.
        after_bytes: Option<u64>,
        /// Requests that it hits.
        count: Option<u64>,
    },
    /// The port is closed for so long (real seconds): connects are refused.
    Refuse {
        /// Real seconds.
        seconds: f64,
    },
    /// Generate requests are read and never answered.
    Hang {
        /// Requests that it hits.
        count: Option<u64>,
    },
    /// Replies leave `routed_experts` out.
    DropR3 {
        /// Replies that it hits.
        count: Option<u64>,
    },
    /// Replies carry so many rows less.
    ShortR3 {
        /// Rows that are missing at the end.
        rows: u32,
        /// Replies that it hits.
        count: Option<u64>,
    },
    /// One byte of the payload is wrong: the rows of another request are sent.
    WrongR3 {
        /// Replies that it hits.
        count: Option<u64>,
    },
    /// `routed_experts_start_len` is not obeyed: rows from 0 on.
    IgnoreStartLen {
        /// Replies that it hits.
        count: Option<u64>,
    },
    /// `/health` and `/health_generate` take so much longer (real seconds).
    SlowHealth {
        /// Real seconds.
        seconds: f64,
    },
    /// The pool of every rank shrinks to so many tokens (unscaled): decode retracts.
    Retract {
        /// Tokens that are left of each rank's pool.
        tokens: u64,
    },
    /// The scheduler stands still for so long, seconds of the model.
    Stall {
        /// Seconds of the model.
        seconds: f64,
    },
    /// The HTTP loop is deaf for so long, seconds of the model.
    StallHttp {
        /// Seconds of the model.
        seconds: f64,
    },
    /// The next requests fail with 500 in the scheduler; the other half is not told.
    FailNext {
        /// Requests.
        count: u32,
    },
    /// Prefill: the next transfers fail.
    FailTransfers {
        /// Transfers.
        count: u32,
    },
    /// Prefill: the next transfers never end.
    StuckTransfer {
        /// Transfers.
        count: u32,
    },
    /// Decode: stuck transfers are let go.
    Unstick,
    /// The process dies: everything is reset, connects are refused until `revive`.
    Kill,
    /// The process is back, empty.
    Revive,
    /// All faults of the HTTP layer end.
    Clear,
}

/// A fault that hits a number of requests.
#[derive(Clone, Debug, Default)]
struct Limited<T> {
    what: Option<T>,
    left: Option<u64>,
}

impl<T: Clone> Limited<T> {
    fn set(&mut self, what: T, left: Option<u64>) {
        *self = Self { what: Some(what), left };
    }

    fn take(&mut self) -> Option<T> {
        let what = self.what.clone()?;
        match &mut self.left {
            Some(0) => return None,
            Some(left) => *left -= 1,
            None => {}
        }
        Some(what)
    }
}

/// What a generate request meets before the engine reads it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Meets {
    Nothing,
    Status(u16, Option<String>),
    Reset,
    Hang,
}

/// What happens to the payload of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct R3Fault {
    pub(crate) drop: bool,
    pub(crate) short: u32,
    pub(crate) wrong: bool,
    pub(crate) ignore_start: bool,
}

/// The HTTP layer's faults of one engine.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    delay: Limited<Duration>,
    status: Limited<(u16, Option<String>)>,
    reset: Limited<()>,
    cut: Limited<u64>,
    hang: Limited<()>,
    drop_r3: Limited<()>,
    short_r3: Limited<u32>,
    wrong_r3: Limited<()>,
    ignore_start: Limited<()>,
    pub(crate) slow_health: Duration,
}

/// What the caller must do about a fault beyond the HTTP layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Beyond {
    Nothing,
    Model(Fault),
    Refuse(Duration),
    Kill,
    Revive,
}

fn real(seconds: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("seconds {seconds}: {e}"))
}

impl Faults {
    /// Takes a fault.
    pub(crate) fn set(&mut self, fault: FaultRequest) -> Result<Beyond, String> {
        match fault {
            FaultRequest::Delay { seconds, count } => self.delay.set(real(seconds)?, count),
            FaultRequest::Status { status, body, count } => {
                if !(200..=599).contains(&status) {
                    return Err(format!("status {status} is not between 200 and 599"));
                }
                self.status.set((status, body), count);
            }
            FaultRequest::Reset { after_bytes: None, count } => self.reset.set((), count),
            FaultRequest::Reset { after_bytes: Some(bytes), count } => self.cut.set(bytes, count),
            FaultRequest::Hang { count } => self.hang.set((), count),
            FaultRequest::DropR3 { count } => self.drop_r3.set((), count),
            FaultRequest::ShortR3 { rows, count } => self.short_r3.set(rows, count),
            FaultRequest::WrongR3 { count } => self.wrong_r3.set((), count),
            FaultRequest::IgnoreStartLen { count } => self.ignore_start.set((), count),
            FaultRequest::SlowHealth { seconds } => self.slow_health = real(seconds)?,
            FaultRequest::Clear => *self = Self::default(),
            FaultRequest::Refuse { seconds } => return Ok(Beyond::Refuse(real(seconds)?)),
            FaultRequest::Retract { tokens } => return Ok(Beyond::Model(Fault::Pool(tokens))),
            FaultRequest::Stall { seconds } => return Ok(Beyond::Model(Fault::StallScheduler(real(seconds)?))),
            FaultRequest::StallHttp { seconds } => return Ok(Beyond::Model(Fault::StallHttp(real(seconds)?))),
            FaultRequest::FailNext { count } => return Ok(Beyond::Model(Fault::FailNext(count))),
            FaultRequest::FailTransfers { count } => return Ok(Beyond::Model(Fault::FailTransfers(count))),
            FaultRequest::StuckTransfer { count } => return Ok(Beyond::Model(Fault::StickTransfers(count))),
            FaultRequest::Unstick => return Ok(Beyond::Model(Fault::Unstick)),
            FaultRequest::Kill => return Ok(Beyond::Kill),
            FaultRequest::Revive => return Ok(Beyond::Revive),
        }
        Ok(Beyond::Nothing)
    }

    /// A generate request has come: how long it is held, and what it meets.
    pub(crate) fn meet(&mut self) -> (Duration, Meets) {
        let delay = self.delay.take().unwrap_or_default();
        if self.hang.take().is_some() {
            return (delay, Meets::Hang);
        }
        if self.reset.take().is_some() {
            return (delay, Meets::Reset);
        }
        match self.status.take() {
            Some((status, body)) => (delay, Meets::Status(status, body)),
            None => (delay, Meets::Nothing),
        }
    }

    /// A reply leaves: bytes after which it is cut.
    pub(crate) fn cut(&mut self) -> Option<u64> {
        self.cut.take()
    }

    /// A reply with a payload leaves.
    pub(crate) fn r3(&mut self) -> R3Fault {
        R3Fault {
            drop: self.drop_r3.take().is_some(),
            short: self.short_r3.take().unwrap_or(0),
            wrong: self.wrong_r3.take().is_some(),
            ignore_start: self.ignore_start.take().is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> FaultRequest {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_counted_fault_hits_so_many_requests_and_no_more() {
        let mut faults = Faults::default();
        faults.set(parse(r#"{"kind":"status","status":503,"count":2}"#)).unwrap();
        assert_eq!(faults.meet().1, Meets::Status(503, None));
        assert_eq!(faults.meet().1, Meets::Status(503, None));
        assert_eq!(faults.meet().1, Meets::Nothing);
        faults.set(parse(r#"{"kind":"hang"}"#)).unwrap();
        assert_eq!(faults.meet().1, Meets::Hang);
        faults.set(parse(r#"{"kind":"clear"}"#)).unwrap();
        assert_eq!(faults.meet(), (Duration::ZERO, Meets::Nothing));
    }

    #[test]
    fn faults_of_the_engine_go_to_the_model() {
        let mut faults = Faults::default();
        assert_eq!(
            faults.set(parse(r#"{"kind":"stuck_transfer","count":3}"#)),
            Ok(Beyond::Model(Fault::StickTransfers(3)))
        );
        assert_eq!(faults.set(parse(r#"{"kind":"retract","tokens":9}"#)), Ok(Beyond::Model(Fault::Pool(9))));
        assert_eq!(faults.set(parse(r#"{"kind":"kill"}"#)), Ok(Beyond::Kill));
    }

    #[test]
    fn unusable_faults_are_refused() {
        assert!(serde_json::from_str::<FaultRequest>(r#"{"kind":"delay"}"#).is_err());
        assert!(serde_json::from_str::<FaultRequest>(r#"{"kind":"hang","cuont":1}"#).is_err());
        let mut faults = Faults::default();
        assert!(faults.set(FaultRequest::Delay { seconds: -1.0, count: None }).is_err());
        assert!(faults.set(FaultRequest::Status { status: 20, body: None, count: None }).is_err());
    }
}
