//! The least that any router does with a PD request, as a yardstick: sends the request to both engines, reads prefill's reply and throws it away,
//! and copies decode's reply to the client unmerged. Nothing is parsed but the heads.
use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::reply::ReplyReader;

const READ_BYTES: usize = 256 * 1024;

/// Serves on a loopback port until the process ends. Calls `ready` once it listens.
///
/// # Errors
/// When the port cannot be bound.
pub fn relay_blocking(port: u16, prefill: &str, decode: &str, ready: impl FnOnce()) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        ready();
        loop {
            let (client, _) = listener.accept().await?;
            let (prefill, decode) = (prefill.to_owned(), decode.to_owned());
            tokio::spawn(async move {
                // A peer that closes is the normal end of a connection.
                let _closed = connection(client, &prefill, &decode).await;
            });
        }
    })
}

async fn connection(mut client: TcpStream, prefill: &str, decode: &str) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut prefill = TcpStream::connect(prefill).await?;
    let mut decode = TcpStream::connect(decode).await?;
    prefill.set_nodelay(true)?;
    decode.set_nodelay(true)?;
    let mut request = Vec::with_capacity(READ_BYTES);
    let (mut scrap, mut piece) = (vec![0; READ_BYTES], vec![0; READ_BYTES]);
    loop {
        let length = loop {
            if let Some(head) = memchr::memmem::find(&request, b"\r\n\r\n") {
                break head + 4 + super::backend::content_length(&request[..head]);
            }
            if client.read_buf(&mut request).await? == 0 {
                return Ok(());
            }
        };
        while request.len() < length {
            if client.read_buf(&mut request).await? == 0 {
                return Ok(());
            }
        }
        prefill.write_all(&request[..length]).await?;
        decode.write_all(&request[..length]).await?;
        request.drain(..length);
        tokio::try_join!(read_away(&mut prefill, &mut scrap), copy(&mut decode, &mut client, &mut piece))?;
    }
}

async fn read_away(from: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut reader = ReplyReader::default();
    loop {
        let read = from.read(buffer).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if reader.feed(&buffer[..read])?.is_some() {
            return Ok(());
        }
    }
}

async fn copy(from: &mut TcpStream, to: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut reader = ReplyReader::default();
    loop {
        let read = from.read(buffer).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let done = reader.feed(&buffer[..read])?;
        to.write_all(&buffer[..read]).await?;
        if done.is_some() {
            return Ok(());
        }
    }
}
