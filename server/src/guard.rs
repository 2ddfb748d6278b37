//! Access control. Without a key, only local programs and the server's own page get in. Other web pages never do, unless allowed.

use crate::{app::App, fault::Fault};
use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use std::{net::IpAddr, sync::Arc};
use subtle::ConstantTimeEq;

/// Lets a request through or refuses it.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = match checked(&app, request.headers(), request.uri()) {
        Ok(origin) => origin,
        Err(fault) => return fault.into_response(),
    };
    // Browsers ask without a key first.
    let preflight = request.method() == Method::OPTIONS;
    if !preflight
        && let Some(key) = &app.key
        && !has_key(request.headers(), key)
    {
        let message = "this server needs its key, as a bearer token or as a password";
        let fault = Fault::new(StatusCode::UNAUTHORIZED, "no_key", message);
        return allowed(fault.into_response(), origin);
    }
    let response = if preflight { preflighted() } else { next.run(request).await };
    allowed(response, origin)
}

/// The web page elsewhere that a request comes from, if it may use the server.
fn checked(app: &App, headers: &HeaderMap, uri: &Uri) -> Result<Option<HeaderValue>, Fault> {
    let refused = |message: String| Fault::new(StatusCode::FORBIDDEN, "forbidden", message);
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).or(uri.authority().map(Authority::as_str)).unwrap_or_default();
    // A page elsewhere can have a name that leads to this machine, but it cannot change what the browser calls the host.
    if app.key.is_none() && !is_local(host) {
        return Err(refused(format!("{host:?} is not a name of this machine, and there is no key")));
    }
    let Some(origin) = headers.get(header::ORIGIN) else {
        // Pictures and scripts of other pages have no origin, but newer browsers say where they are used.
        let site = text(HeaderName::from_static("sec-fetch-site"));
        let navigates = text(HeaderName::from_static("sec-fetch-mode")) == Some("navigate");
        return match site {
            Some("cross-site") if !navigates => {
                Err(refused("another web page may not use this server".into()))
            }
            _ => Ok(None),
        };
    };
    let name = origin.to_str().unwrap_or_default();
    let own = name.split_once("://").is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host));
    if own {
        return Ok(None);
    }
    if app.origins.iter().any(|known| known.trim_end_matches('/').eq_ignore_ascii_case(name)) {
        return Ok(Some(origin.clone()));
    }
    Err(refused(format!("web pages of {name} may not use this server: allow them when starting it")))
}

/// Whether a host is this machine: `localhost` or a loopback address, with any port.
fn is_local(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether a request shows the key.
fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let same = |shown: &[u8]| bool::from(shown.ct_eq(key.as_bytes()));
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some((scheme, value)) = given.and_then(|text| text.split_once(' ')) else { return false };
    match scheme.to_ascii_lowercase().as_str() {
        "bearer" => same(value.trim().as_bytes()),
        "basic" => STANDARD.decode(value.trim()).is_ok_and(|pair| {
            let password = pair.iter().position(|byte| *byte == b':').map_or(&[][..], |at| &pair[at + 1..]);
            same(&pair) || same(password)
        }),
        _ => false,
    }
}

fn preflighted() -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ALLOW, HeaderValue::from_static("GET, POST, OPTIONS"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    let names = HeaderValue::from_static("authorization, content-type");
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    response
}

/// Tells the browser that a page elsewhere may read the response.
fn allowed(mut response: Response<Body>, origin: Option<HeaderValue>) -> Response {
    if let Some(origin) = origin {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("Origin"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{Folders, Library};
    use sdrun::Paths;

    fn app(key: Option<&str>, dir: &std::path::Path) -> App {
        let paths = Paths::for_user(Some(dir), Some(dir)).unwrap();
        let library = Arc::new(Library::open(Folders::default(), paths).unwrap());
        App::new(library, 1, key.map(str::to_string), vec!["https://friend.example".into()])
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn pages_elsewhere_and_foreign_names_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (open, closed) = (app(None, dir.path()), app(Some("k"), dir.path()));
        let check = |app: &App, pairs: &[(&'static str, &str)]| {
            checked(app, &headers(pairs), &Uri::from_static("/")).map_err(|fault| fault.status)
        };
        for host in ["127.0.0.1:7860", "localhost", "LOCALHOST:1", "[::1]:80", "127.3.2.1"] {
            assert_eq!(check(&open, &[("host", host)]), Ok(None), "{host}");
            let origin = format!("http://{host}");
            assert_eq!(check(&open, &[("host", host), ("origin", &origin)]), Ok(None), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "192.168.0.1", "", "localhost.evil"] {
            assert_eq!(check(&open, &[("host", host)]), Err(403), "{host}");
        }
        assert_eq!(check(&closed, &[("host", "my-pc.local:7860")]), Ok(None));
        for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
            assert_eq!(check(&open, &[("host", "127.0.0.1:7860"), ("origin", origin)]), Err(403), "{origin}");
        }
        let friend = check(&open, &[("host", "localhost"), ("origin", "https://friend.example")]);
        assert_eq!(friend, Ok(Some("https://friend.example".parse().unwrap())));
        let site = ("sec-fetch-site", "cross-site");
        assert_eq!(check(&open, &[("host", "localhost"), site]), Err(403));
        assert_eq!(check(&open, &[("host", "localhost"), site, ("sec-fetch-mode", "navigate")]), Ok(None));
    }

    #[test]
    fn the_key_comes_in_two_forms() {
        let shown = |value: &str| has_key(&headers(&[("authorization", value)]), "se:cret");
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        assert!(shown("Bearer se:cret") && shown("bearer se:cret") && shown(&basic("anyone:se:cret")));
        assert!(shown(&basic("se:cret")), "a user and a password");
        for value in ["Bearer secret", "Bearer ", "Basic ", "Basic !", "se:cret", ""] {
            assert!(!shown(value), "{value}");
        }
        assert!(!shown(&basic("se:other")) && !has_key(&HeaderMap::new(), ""));
    }
}
