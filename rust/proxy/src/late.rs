//! A part of a joined stream that may not have begun: parts take turns when the fleet has no room for all at once, and those that
//! have begun must be read meanwhile, or they would never end and make room.
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::{Body, Frame};
use r3router_core::error::{Error, Kind, Source};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::attempts::{Answer, Ready, Refusal};
use crate::body::Cut;
use crate::context::Count;
use crate::relay::{Relay, error_event};

/// Ends its task when it is dropped, and with it the legs of the part.
#[derive(Debug)]
pub struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where a part stands.
#[derive(Debug)]
enum State {
    Waiting { answer: oneshot::Receiver<Result<Answer, Refusal>>, _task: Task },
    Begun(Box<Relay>),
    Over,
}

/// See the module's text.
#[derive(Debug)]
pub struct Late {
    state: State,
    count: Arc<Count>,
}

/// Status and headers of a part that has begun.
pub type Head = (StatusCode, HeaderMap);

fn broken(what: &'static str) -> Refusal {
    Refusal { error: Error::new(Kind::Internal, Source::Router, what), kept: None }
}

impl Late {
    /// A part that `task` serves; its answer comes by `answer`.
    pub fn new(answer: oneshot::Receiver<Result<Answer, Refusal>>, task: AbortHandle, count: Arc<Count>) -> Self {
        Self { state: State::Waiting { answer, _task: Task(task) }, count }
    }

    /// Ready with the head once it has begun.
    ///
    /// # Errors
    /// Why it cannot begin. It is over then.
    pub fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<Result<Head, Refusal>> {
        let State::Waiting { answer, .. } = &mut self.state else { return Poll::Pending };
        let answer = std::task::ready!(Pin::new(answer).poll(cx));
        self.state = State::Over;
        match answer {
            Ok(Ok(Answer { status, headers, ready: Ready::Stream(relay) })) => {
                self.state = State::Begun(relay);
                Poll::Ready(Ok((status, headers)))
            }
            Ok(Ok(_)) => Poll::Ready(Err(broken("a part of the reply is no stream"))),
            Ok(Err(refusal)) => Poll::Ready(Err(refusal)),
            Err(_) => Poll::Ready(Err(broken("a part of the request was lost"))),
        }
    }
}

impl Body for Late {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if matches!(self.state, State::Waiting { .. })
            && let Err(Refusal { error, .. }) = std::task::ready!(self.poll_begin(cx))
        {
            self.count.failed(error.kind, error.http_status());
            return Poll::Ready(Some(Ok(Frame::data(error_event(&error)))));
        }
        match &mut self.state {
            State::Begun(relay) => Pin::new(relay).poll_frame(cx),
            State::Waiting { .. } | State::Over => Poll::Ready(None),
        }
    }
}
