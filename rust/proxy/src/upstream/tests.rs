//! Connections that an engine closes while a call is on its way to them.
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// Reads one request without a body and answers it.
async fn answer(socket: &mut TcpStream) -> io::Result<()> {
    let mut seen = Vec::new();
    while !seen.ends_with(b"\r\n\r\n") {
        let mut piece = [0; 1024];
        let count = socket.read(&mut piece).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        seen.extend_from_slice(&piece[..count]);
    }
    socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await
}

/// An engine whose first connection answers once and then closes when it is told to; the second answers once too.
async fn engine() -> (Arc<Pool>, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let (close, told) = oneshot::channel();
    tokio::spawn(async move {
        let (mut first, _) = listener.accept().await.expect("a connection");
        answer(&mut first).await.expect("a request");
        told.await.expect("the test goes on");
        drop(first);
        let (mut second, _) = listener.accept().await.expect("another connection");
        answer(&mut second).await.expect("the request once more");
    });
    let address = Address::parse(&format!("http://127.0.0.1:{port}")).expect("an address");
    (Pool::new(address, LONG, LONG, &Arc::default()), close)
}

fn call() -> Call {
    Call::get(Uri::from_static("/health"))
}

#[tokio::test]
async fn a_call_given_to_a_connection_that_has_just_closed_fails_at_once_and_was_not_sent() {
    let (pool, close) = engine().await;
    let (head, body) = pool.send(&call()).await.expect("a reply").collect(100).await.expect("a body");
    assert_eq!((head.status, &body[..]), (http::StatusCode::OK, &b"ok"[..]));
    let wire = poll_fn(|cx| Poll::Ready(pool.checkout(cx))).await.expect("the connection is kept");
    // Between the look at the connection and the writing of the request, the engine closes it.
    close.send(()).expect("the engine waits");
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut sent = 0;
    let ended = timeout(Duration::from_secs(10), pool.exchange(wire, &call(), &mut || sent += 1)).await;
    let fault = ended.expect("a call on a dead connection ends").expect_err("there is no reply");
    assert!(matches!(fault, Fault::Reset { answered: false, .. }), "{fault}");
}

#[tokio::test]
async fn a_call_that_finds_its_connection_closed_is_sent_on_another_one() {
    let (pool, close) = engine().await;
    pool.send(&call()).await.expect("a reply").collect(100).await.expect("a body");
    close.send(()).expect("the engine waits");
    // Whether the closing is seen at the look or in the exchange, the call has its reply.
    let got = timeout(Duration::from_secs(10), pool.send(&call())).await.expect("it ends").expect("a reply");
    assert_eq!(got.head.status, http::StatusCode::OK);
    assert_eq!(pool.stats.opened.load(Ordering::Relaxed), 2);
}
