//! Batches and n > 1: each prompt and sample is a request of its own, with its own pair, room and ids; the replies are joined in order.
//! One that fails fails the whole and ends the others.
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use r3router_core::error::{Error, Kind, Source};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::attempts::{Answer, Mode, Ready, Refusal, serve, sized};
use crate::body::ReplyBody;
use crate::context::{Count, Shared};
use crate::errors::Reply;
use crate::generate::reply;
use crate::late::Late;
use crate::live::{Owner, Sub};
use crate::merge::{Merged, join_json, join_sse};
use crate::relay::ClientBody;

fn broken(what: &'static str) -> Refusal {
    Refusal { error: Error::new(Kind::Internal, Source::Router, what), kept: None }
}

/// Serves every sub-request at once and joins the replies.
///
/// # Errors
/// The first failure; all other sub-requests are ended.
pub async fn serve_all(shared: &Arc<Shared>, count: &Arc<Count>) -> Result<Reply, Refusal> {
    let subs = shared.facts.subs();
    // All or nothing: no part is sent when another can never be.
    for index in (0..subs).step_by(shared.facts.samples as usize) {
        let request = sized(shared, Mode { index, whole: false, joined: true });
        shared.app.gate.check(&request).map_err(|error| Refusal { error, kept: None })?;
    }
    // All are live before the first is sent, so that an abort by the client's id finds each.
    let start = |index| Sub::start(&shared.app, shared.facts.rid(index), shared.trace.as_ref());
    let owners: Vec<_> = (0..subs).map(start).collect();
    if shared.facts.stream {
        return stream_all(shared, count, owners).await;
    }
    let mut tasks: JoinSet<(usize, Result<Answer, Refusal>)> = JoinSet::new();
    for (index, sub) in owners.into_iter().enumerate() {
        let (shared, count) = (Arc::clone(shared), Arc::clone(count));
        tasks.spawn(async move {
            let mode = Mode { index, whole: false, joined: true };
            (index, serve(&shared, sub, mode, &count).await)
        });
    }
    let mut answers: Vec<Option<Answer>> = (0..subs).map(|_| None).collect();
    while let Some(joined) = tasks.join_next().await {
        // Dropping the set ends the other tasks, and each of them its own legs.
        let (index, answer) = joined.map_err(|_| broken("a part of the request was lost"))?;
        if let Some(place) = answers.get_mut(index) {
            *place = Some(answer?);
        }
    }
    join(shared, count, answers)
}

fn join(shared: &Arc<Shared>, count: &Arc<Count>, answers: Vec<Option<Answer>>) -> Result<Reply, Refusal> {
    let mut head = None;
    let mut merged: Vec<Merged> = Vec::new();
    for answer in answers {
        let Some(Answer { status, headers, ready }) = answer else {
            return Err(broken("a part of the request is missing"));
        };
        head.get_or_insert((status, headers));
        match ready {
            Ready::Merged(part) => merged.push(part),
            Ready::Stream(_) | Ready::Whole(_) => return Err(broken("a part of the reply cannot be joined")),
        }
    }
    let Some((status, headers)) = head else { return Err(broken("the request has no parts")) };
    let code = status.as_u16();
    let count = Arc::clone(count);
    let joined = join_json(merged, &shared.facts).map_err(|error| Refusal { error, kept: None })?;
    let body = ReplyBody::Stream(Box::new(ClientBody::new(Box::pin(joined), count, code)));
    Ok(reply(status, headers, body))
}

/// The joined stream begins with its first part; the others join it as they are bound. Were all awaited, the first parts would keep
/// their places unread while the last wait for one.
async fn stream_all(shared: &Arc<Shared>, count: &Arc<Count>, owners: Vec<Owner>) -> Result<Reply, Refusal> {
    let mut parts: Vec<Late> = Vec::with_capacity(owners.len());
    for (index, sub) in owners.into_iter().enumerate() {
        let (sender, receiver) = oneshot::channel();
        let (of, counted) = (Arc::clone(shared), Arc::clone(count));
        let task = shared.app.runtime.spawn(async move {
            let mode = Mode { index, whole: false, joined: true };
            // A receiver that is gone drops the answer here, and its attempt is aborted.
            let _ = sender.send(serve(&of, sub, mode, &counted).await);
        });
        parts.push(Late::new(receiver, task.abort_handle(), Arc::clone(count)));
    }
    let (status, headers) = poll_fn(|cx| {
        let mut head = None;
        for part in &mut parts {
            // A part that fails before anything was sent fails the request with its own status.
            if let Poll::Ready(begun) = part.poll_begin(cx) {
                match begun {
                    Ok(begun) => head = head.take().or(Some(begun)),
                    Err(refusal) => return Poll::Ready(Err(refusal)),
                }
            }
        }
        head.map_or(Poll::Pending, |head| Poll::Ready(Ok(head)))
    })
    .await?;
    let joined = join_sse(parts, &shared.facts);
    let body = ClientBody::new(Box::pin(joined), Arc::clone(count), status.as_u16());
    Ok(reply(status, headers, ReplyBody::Stream(Box::new(body))))
}
