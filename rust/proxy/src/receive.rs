//! Request bodies: one limit for every route and framing, one copy at most, and an answer that the client can read when it is passed.
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use r3router_core::error::{Error, Kind, Source};

/// What is reserved at once for a body of a known length; more is reserved as it comes, so that a length alone costs nothing.
const RESERVE: usize = 64 << 20;
/// How much of a body over the limit is read and dropped, so that a client that sends all before it reads can read the answer.
const DISCARD: u64 = 64 << 20;
/// How long it may take.
const DISCARD_TIME: Duration = Duration::from_secs(10);

fn too_large(limit: u64, measured: u64) -> Error {
    Error::new(
        Kind::BodyTooLarge,
        Source::Client,
        format!("the body has {measured} bytes or more; the limit is {limit}"),
    )
    .with_limit(limit as f64, measured as f64)
    .advise("send less, or raise --max-payload-size")
}

/// Reads a whole body of at most `limit` bytes.
///
/// # Errors
/// `BodyTooLarge`, or `ClientGone` when the connection broke.
pub async fn body(mut incoming: Incoming, headers: &HeaderMap, limit: u64) -> Result<Bytes, Error> {
    let announced = incoming.size_hint().exact();
    if let Some(length) = announced
        && length > limit
    {
        // A client that asks first has sent nothing yet and will not.
        if !headers.contains_key(header::EXPECT) {
            discard(&mut incoming).await;
        }
        return Err(too_large(limit, length));
    }
    let mut whole: Option<Bytes> = None;
    let mut more = BytesMut::new();
    let mut size = 0u64;
    while let Some(frame) = incoming.frame().await {
        let frame =
            frame.map_err(|e| Error::new(Kind::ClientGone, Source::Client, format!("the body broke off: {e}")))?;
        let Ok(piece) = frame.into_data() else { continue };
        size += piece.len() as u64;
        if size > limit {
            discard(&mut incoming).await;
            return Err(too_large(limit, size));
        }
        match whole.take() {
            None if more.is_empty() => whole = Some(piece),
            None => more.extend_from_slice(&piece),
            Some(first) => {
                let rest = announced.and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
                more.reserve(rest.min(RESERVE).max(first.len() + piece.len()));
                more.extend_from_slice(&first);
                more.extend_from_slice(&piece);
            }
        }
    }
    Ok(whole.unwrap_or_else(|| more.freeze()))
}

async fn discard(incoming: &mut Incoming) {
    let dropped = async {
        let mut size = 0;
        while let Some(Ok(frame)) = incoming.frame().await {
            size += frame.data_ref().map_or(0, |d| d.len() as u64);
            if size > DISCARD {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_TIME, dropped).await;
}
