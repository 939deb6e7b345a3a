//! Spans on their way out: taken from a queue of bounded length and sent in batches by one task, which is the only one that waits for the
//! collector.
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::{Counts, Span};
use crate::metrics::SpanFate;

/// Spans that wait at most, a second of 1,600 requests a second; about 1 KB each.
pub(super) const ROOM: usize = 8192;
/// Spans that are sent at once at most.
const BATCH: usize = 512;
/// How long the first of a batch waits for others.
#[cfg(feature = "otlp")]
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Sends what comes, in batches that wait for `most` at most, until there are no more, or until it is told that it closes and nothing is left.
pub(super) async fn run<F>(
    mut spans: mpsc::Receiver<Span>,
    mut closing: watch::Receiver<bool>,
    counts: Arc<Counts>,
    to: String,
    most: Duration,
    send: impl Fn(Vec<Span>) -> F,
) where
    F: Future<Output = Result<(), String>>,
{
    let mut closed = false;
    let mut down = false;
    loop {
        let mut batch = Vec::new();
        let mut pause = None;
        while batch.len() < BATCH {
            let room = BATCH - batch.len();
            tokio::select! {
                biased;
                _ = closing.changed(), if !closed => {
                    closed = true;
                    spans.close();
                }
                taken = spans.recv_many(&mut batch, room) => match (taken, batch.is_empty()) {
                    (0, true) => return,
                    (0, false) => break,
                    _ if pause.is_none() => pause = Some(Box::pin(tokio::time::sleep(most))),
                    _ => {}
                },
                () = async { match pause.as_mut() { Some(pause) => pause.await, None => std::future::pending().await } } => break,
            }
        }
        let size = batch.len() as u64;
        match send(batch).await {
            Ok(()) => {
                counts.add(SpanFate::Exported as usize, size);
                if std::mem::take(&mut down) {
                    tracing::info!(to, "traces are delivered again");
                }
            }
            Err(why) => {
                counts.add(SpanFate::Failed as usize, size);
                if !std::mem::replace(&mut down, true) {
                    tracing::warn!(
                        to,
                        why,
                        "traces are not delivered; spans are dropped and counted in r3router_trace_spans_total until they are"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, SystemTime};

    use parking_lot::Mutex;

    use super::{BATCH, ROOM};
    use crate::metrics::SpanFate;
    use crate::trace::{Counts, Place, Side, Span, Traces};

    fn span() -> Span {
        let at = SystemTime::UNIX_EPOCH;
        Span {
            name: "s".into(),
            side: Side::Internal,
            place: Place::root(1.0),
            parent: 0,
            remote: false,
            began: at,
            ended: at,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        }
    }

    fn counted(counts: &Counts) -> [u64; 3] {
        [SpanFate::Exported, SpanFate::Dropped, SpanFate::Failed].map(|fate| counts.get(fate as usize))
    }

    /// Waits for what must come.
    async fn until(is: impl Fn() -> bool) {
        while !is() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn spans_leave_together_and_all_of_them_at_the_end() {
        let (counts, batches) = (Arc::new(Counts::default()), Arc::new(Mutex::new(Vec::new())));
        let kept = Arc::clone(&batches);
        // Nothing but a full batch and the end makes them leave.
        let traces =
            Traces::sending(&counts, 1.0, "there".to_owned(), Duration::from_secs(3600), move |spans: Vec<Span>| {
                kept.lock().push(spans.len());
                async { Ok(()) }
            });
        for _ in 0..BATCH + 3 {
            traces.take(span());
        }
        until(|| counted(&counts)[0] > 0).await;
        assert_eq!(*batches.lock(), [BATCH], "a full batch does not wait");
        traces.take(span());
        traces.finish(Duration::from_secs(60)).await;
        assert_eq!(*batches.lock(), [BATCH, 4]);
        traces.take(span());
        assert_eq!(counted(&counts), [BATCH as u64 + 4, 1, 0]);
    }

    #[tokio::test]
    async fn a_collector_that_hangs_costs_spans_and_no_more_than_the_queue() {
        let (counts, taken) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let told = Arc::clone(&taken);
        let traces = Traces::sending(&counts, 1.0, "there".to_owned(), Duration::from_secs(3600), move |_| {
            told.store(true, Ordering::Relaxed);
            std::future::pending()
        });
        for _ in 0..BATCH {
            traces.take(span());
        }
        until(|| taken.load(Ordering::Relaxed)).await;
        for _ in 0..ROOM + 7 {
            traces.take(span());
        }
        assert_eq!(counted(&counts), [0, 7, 0]);
        // Ends although the collector never does.
        traces.finish(Duration::from_millis(10)).await;
    }

    #[tokio::test]
    async fn what_cannot_be_sent_is_counted() {
        let counts = Arc::new(Counts::default());
        let refused = |_| async { Err("refused".to_owned()) };
        let traces = Traces::sending(&counts, 1.0, "there".to_owned(), Duration::ZERO, refused);
        for sent in 1..=5 {
            traces.take(span());
            until(|| counted(&counts)[2] == sent).await;
        }
        assert_eq!(counted(&counts), [0, 0, 5]);
    }
}
