//! Chunks of an upstream body, with its errors in the router's terms.
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body;
use r3router_core::error::{Error, Kind, Source};

use super::Plan;

/// The next chunk with bytes in it; `None` at the end.
pub(super) fn poll_next<B>(
    body: &mut B,
    cx: &mut Context<'_>,
    source: Source,
    plan: &Plan,
) -> Poll<Result<Option<Bytes>, Error>>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    loop {
        return match Pin::new(&mut *body).poll_frame(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Ok(None)),
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if !data.is_empty() => Poll::Ready(Ok(Some(data))),
                _ => continue,
            },
            Poll::Ready(Some(Err(e))) => {
                let message = format!("the engine's connection broke in the middle of its reply: {e}");
                Poll::Ready(Err(super::resolve::at(plan, Error::new(Kind::Reset, source, message).retryable())))
            }
        };
    }
}

/// See [`poll_next`].
pub(super) async fn next<B>(body: &mut B, source: Source, plan: &Plan) -> Result<Option<Bytes>, Error>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    poll_fn(|cx| poll_next(body, cx, source, plan)).await
}
