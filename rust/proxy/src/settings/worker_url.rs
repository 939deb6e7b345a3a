//! One spelling for each engine address, so that a flag, an API call and a trainer mean the same worker.

/// Scheme, host and port without trailing slash: `HTTP://Host:30000/` becomes `http://host:30000`. A missing scheme means `http`.
///
/// # Errors
/// A sentence that says what is wrong and what to write.
pub fn normalise(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the worker URL is empty; write http://HOST:PORT".to_owned());
    }
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let uri: http::Uri = full.parse().map_err(|e| format!("`{text}` is not a URL ({e}); write http://HOST:PORT"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err(format!("`{text}`: TLS to workers is not built yet; write http://HOST:PORT")),
        Some("grpc" | "grpcs") => {
            return Err(format!("`{text}`: gRPC workers are not supported; use the engine's HTTP port"));
        }
        other => return Err(format!("`{text}` has the scheme `{}`; write http://HOST:PORT", other.unwrap_or(""))),
    }
    let authority = uri.authority().ok_or_else(|| format!("`{text}` names no host; write http://HOST:PORT"))?;
    if authority.as_str().contains('@') {
        return Err(format!(
            "`{text}` carries `@`; write the engine's base URL, r3router finds its data-parallel ranks itself"
        ));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(format!("`{text}` has a path; write only http://HOST:PORT"));
    }
    if authority.host().is_empty() {
        return Err(format!("`{text}` names no host; write http://HOST:PORT"));
    }
    // `port_u16` takes a port that is too large for none, so the text itself is read.
    let port = match authority.as_str().get(authority.host().len()..).unwrap_or("") {
        "" => None,
        after => match after.trim_start_matches(':').parse::<u16>() {
            Ok(port) if port > 0 => Some(port),
            _ => return Err(format!("`{text}` has no usable port; write http://HOST:PORT")),
        },
    };
    let host = authority.host().to_ascii_lowercase();
    Ok(port.map_or_else(|| format!("http://{host}"), |p| format!("http://{host}:{p}")))
}
