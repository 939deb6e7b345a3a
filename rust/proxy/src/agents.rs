//! Rows that engines keep on their hosts, pulled for clients that want them in the reply.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method, Uri};
use parking_lot::Mutex;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Dtype;
use r3router_core::r3::descriptor::{Descriptor, ROWS_AT};

use crate::address::Address;
use crate::allow::Allow;
use crate::app::CONNECT;
use crate::store::{Arena, Rows};
use crate::tls::ClientTls;
use crate::upstream::{Call, Pool};

/// Most agents that connections are kept to; addresses come from engines.
const MAX_AGENTS: usize = 4096;

/// Connections to the agents of engines' hosts.
#[derive(Debug)]
pub struct Agents {
    pools: Mutex<HashMap<String, Arc<Pool>>>,
    idle: Duration,
    allow: Arc<Allow>,
    key: Option<http::HeaderValue>,
    tls: Option<Arc<ClientTls>>,
}

/// The HTTP address of an object: `r3://host:port/id` is `http://host:port/r3/id`.
pub fn http_address(uri: &str) -> String {
    match uri.strip_prefix("r3://").and_then(|rest| rest.split_once('/')) {
        Some((authority, id)) => format!("http://{authority}/r3/{id}"),
        None => uri.to_owned(),
    }
}

impl Agents {
    /// Connections that are kept idle for `idle`, with `key` as their authorization.
    pub fn new(idle: Duration, allow: Arc<Allow>, key: Option<http::HeaderValue>, tls: Option<Arc<ClientTls>>) -> Self {
        Self { pools: Mutex::default(), idle, allow, key, tls }
    }

    fn pool(&self, base: &str) -> Result<Arc<Pool>, Error> {
        if let Some(pool) = self.pools.lock().get(base) {
            return Ok(Arc::clone(pool));
        }
        let address = Address::parse(base)?;
        // Engines name these addresses, and the key goes there.
        self.allow.check(&address)?;
        let pool = Pool::secured(address, self.idle, CONNECT, self.tls.clone(), &self.allow);
        let mut pools = self.pools.lock();
        if pools.len() >= MAX_AGENTS {
            pools.clear();
        }
        pools.insert(base.to_owned(), Arc::clone(&pool));
        Ok(pool)
    }

    /// Fetches the rows of `d` into the arena and lets the object go. Nothing is taken that does not have the descriptor's checksum.
    ///
    /// # Errors
    /// `R3Mismatch` when the agent has other bytes or none, `Connect` and `Reset` when it cannot be reached, `R3ArenaTooSmall`.
    pub async fn pull(&self, d: &Descriptor, source: Source, arena: &Arena) -> Result<Rows, Error> {
        let row = u64::from(d.layers) * u64::from(d.top_k) * d.dtype.size() as u64;
        let length = u64::from(d.rows) * row;
        let mut rows = Rows::new(arena, Dtype::I32, usize::try_from(length / d.dtype.size() as u64).unwrap_or(0));
        if length == 0 {
            return Ok(rows);
        }
        let failed = |kind: Kind, what: String| {
            Error::new(kind, source, format!("the rows at {} cannot be fetched: {what}", d.uri))
                .advise("see whether the agent on the engine's host runs and can be reached from here")
        };
        let address = http_address(&d.uri);
        let uri: Uri = address.parse().map_err(|_| failed(Kind::R3Mismatch, "it is no address".to_owned()))?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(failed(Kind::R3Mismatch, "it is no address".to_owned()));
        };
        let pool = self.pool(&format!("{scheme}://{authority}"))?;
        let from = d.offset.saturating_sub(ROWS_AT);
        let path: Uri = uri.path().parse().map_err(|_| failed(Kind::R3Mismatch, "it is no address".to_owned()))?;
        let mut call = Call::get(path.clone()).with_key(self.key.as_ref());
        // Whole objects are asked for as such, since only they come with their checksum.
        if from > 0
            && let Ok(range) = format!("bytes={from}-{}", from + length - 1).parse()
        {
            call.headers.insert(http::header::RANGE, range);
        }
        let mut exchange = pool.send(&call).await.map_err(|e| failed(Kind::Reset, e.to_string()).retryable())?;
        let status = exchange.head.status;
        if !status.is_success() {
            let kind = if status.is_server_error() { Kind::EngineFailed } else { Kind::R3Mismatch };
            return Err(failed(kind, format!("the agent answered {status}")));
        }
        let (mut crc, mut came, mut carry) = (crc32fast::Hasher::new(), 0u64, Vec::new());
        while let Some(piece) = std::future::poll_fn(|cx| exchange.poll_chunk(cx)).await {
            let piece = piece.map_err(|e| failed(Kind::Reset, e.to_string()).retryable())?;
            came += piece.len() as u64;
            if came > length {
                break;
            }
            crc.update(&piece);
            push(&mut rows, d.dtype, &mut carry, &piece)?;
        }
        let crc = crc.finalize();
        let sent = exchange.head.headers.get("x-r3-crc32").and_then(|v| v.to_str().ok()?.parse().ok());
        let Some(wanted) = d.crc32.or(sent) else {
            return Err(failed(
                Kind::R3Mismatch,
                "neither the descriptor nor the agent says their checksum".to_owned(),
            ));
        };
        if came != length || crc != wanted {
            let what = if came == length { "they have another checksum" } else { "they have another length" };
            let (limit, measured) =
                if came == length { (wanted.into(), crc.into()) } else { (length as f64, came as f64) };
            return Err(failed(Kind::R3Mismatch, what.to_owned()).with_limit(limit, measured));
        }
        let done = Call { method: Method::DELETE, uri: path, headers: HeaderMap::new(), pieces: Arc::from([]) };
        let done = done.with_key(self.key.as_ref());
        tokio::spawn(async move {
            // What is not let go expires.
            if let Ok(mut exchange) = pool.send(&done).await {
                while let Some(Ok(_)) = std::future::poll_fn(|cx| exchange.poll_chunk(cx)).await {}
            }
        });
        Ok(rows)
    }
}

/// Appends `piece`; what is no whole number waits in `carry`.
fn push(rows: &mut Rows, dtype: Dtype, carry: &mut Vec<u8>, piece: &[u8]) -> Result<(), Error> {
    let size = dtype.size();
    let mut rest = piece;
    if !carry.is_empty() {
        let take = (size - carry.len()).min(rest.len());
        let (head, tail) = rest.split_at(take);
        carry.extend_from_slice(head);
        rest = tail;
        if carry.len() < size {
            return Ok(());
        }
        rows.push_narrow(dtype, carry)?;
        carry.clear();
    }
    let whole = rest.len() / size * size;
    let (head, tail) = rest.split_at(whole);
    rows.push_narrow(dtype, head)?;
    carry.extend_from_slice(tail);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{http_address, push};
    use crate::store::{Arena, Reader, Rows};
    use r3router_core::r3::Dtype;
    use std::sync::Arc;

    #[test]
    fn addresses_of_agents_are_http() {
        assert_eq!(http_address("r3://10.0.0.7:9400/17ab"), "http://10.0.0.7:9400/r3/17ab");
        assert_eq!(http_address("http://[::1]:9/r3/1"), "http://[::1]:9/r3/1");
    }

    #[test]
    fn narrow_rows_come_out_as_int32_whatever_the_pieces() {
        for (dtype, numbers) in
            [(Dtype::U8, vec![1u32, 2, 250]), (Dtype::U16, vec![1, 700, 65_535]), (Dtype::I32, vec![9, 1 << 30, 3])]
        {
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()[..dtype.size()].to_vec()).collect();
            for step in 1..=bytes.len() {
                let mut rows = Rows::new(&Arena::new(1 << 20), Dtype::I32, 3);
                let mut carry = Vec::new();
                for piece in bytes.chunks(step) {
                    push(&mut rows, dtype, &mut carry, piece).unwrap();
                }
                let mut out = vec![0; 64];
                let n = Reader::new(Arc::new(rows), 0, 3).fill(&mut out);
                let wide: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
                assert_eq!(&out[..n], wide, "{dtype:?} in steps of {step}");
            }
        }
    }
}
