//! The time limits of a running request: delivery of the KV, and the request as a whole. Both stand still while the fleet is paused.
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use r3router_core::error::{Error, Kind, Source};
use tokio::time::Sleep;

use crate::admit::Gate;

/// See the module's text.
#[derive(Debug)]
pub struct Timer {
    sleep: Pin<Box<Sleep>>,
    started: Instant,
    request_at: Instant,
    request_limit: Duration,
    delivery_at: Instant,
    delivery_limit: Duration,
    /// Pauses of the fleet that were over when the timer was made.
    paused_before: Duration,
}

impl Timer {
    /// A timer for an attempt that is sent now, of a request that must be over at `request_at`, `request_limit` after its arrival.
    pub fn new(gate: &Gate, delivery_limit: Duration, request_at: Instant, request_limit: Duration) -> Self {
        let started = Instant::now();
        let delivery_at = started + delivery_limit;
        Self {
            sleep: Box::pin(tokio::time::sleep_until(delivery_at.min(request_at).into())),
            started,
            request_at,
            request_limit,
            delivery_at,
            delivery_limit,
            paused_before: gate.paused_total(),
        }
    }

    /// A timer for a request as a whole, that came at `arrived`. What it is polled with must say that all is delivered.
    pub fn of_request(gate: &Gate, arrived: Instant, limit: Duration) -> Self {
        Self::new(gate, limit, arrived + limit, limit)
    }

    /// Ready with the limit that was passed. `delivered` is asked when the delivery limit is due.
    pub fn poll(&mut self, cx: &mut Context<'_>, gate: &Gate, delivered: impl Fn() -> bool) -> Poll<Error> {
        while self.sleep.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let paused = gate.paused_total().saturating_sub(self.paused_before);
            let request_at = self.request_at + paused;
            if now >= request_at {
                return Poll::Ready(
                    limit(
                        Kind::RequestTimeout,
                        self.request_limit,
                        self.request_limit + now.duration_since(request_at),
                    )
                    .advise("raise --request-timeout-secs, or ask for less at once"),
                );
            }
            let delivery_at = self.delivery_at + paused;
            let next = if delivered() {
                request_at
            } else if now >= delivery_at {
                let waited = now.duration_since(self.started).saturating_sub(paused);
                return Poll::Ready(
                    limit(Kind::DeliveryTimeout, self.delivery_limit, waited)
                        .advise("see whether prefill answers and the transfer backend is up; --delivery-timeout-secs sets the limit"),
                );
            } else {
                delivery_at.min(request_at)
            };
            // While the fleet is paused the deadlines move on; they are looked at now and then.
            let next = if gate.is_paused() { next.max(now + Duration::from_millis(100)) } else { next };
            self.sleep.as_mut().reset(next.into());
        }
        Poll::Pending
    }
}

fn limit(kind: Kind, limit: Duration, measured: Duration) -> Error {
    let what = match kind {
        Kind::DeliveryTimeout => "the request was sent to engines and no token came in time",
        _ => "the request took longer than its limit",
    };
    Error::new(
        kind,
        Source::Router,
        format!("{what} ({:.1} s of {:.1} s)", measured.as_secs_f64(), limit.as_secs_f64()),
    )
    .with_limit(limit.as_secs_f64(), measured.as_secs_f64())
}
