//! The page, which is part of the program.

use crate::app::App;
use axum::{
    Router,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
    routing::get,
};
use std::sync::Arc;

/// Only the page's own files run.
const POLICY: &str = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; form-action 'none'; base-uri 'none'";

macro_rules! files {
    ($($address:literal $file:literal $kind:literal,)*) => {
        pub(super) fn router() -> Router<Arc<App>> {
            Router::new()$(.route($address, get(async || {
                reply($kind, include_str!(concat!("../../page/", $file)))
            })))*
        }
    };
}

files! {
    "/" "index.html" "text/html; charset=utf-8",
    "/page/style.css" "style.css" "text/css; charset=utf-8",
    "/page/api.js" "api.js" "text/javascript; charset=utf-8",
    "/page/app.js" "app.js" "text/javascript; charset=utf-8",
    "/page/dom.js" "dom.js" "text/javascript; charset=utf-8",
    "/page/form.js" "form.js" "text/javascript; charset=utf-8",
    "/page/gallery.js" "gallery.js" "text/javascript; charset=utf-8",
    "/page/mask.js" "mask.js" "text/javascript; charset=utf-8",
    "/page/start.js" "start.js" "text/javascript; charset=utf-8",
}

fn reply(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
