//! The APIs. Each translates requests into tasks, and what became of them into replies.

pub(crate) mod sdapi;

mod body;
mod controlnet;
mod extras;
mod internal;
mod jobs;
mod library;
mod openai;
mod page;

use crate::{app::App, fault::Fault, guard};
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{StatusCode, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use std::sync::Arc;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    // Easy Diffusion puts `/v1` before A1111's paths.
    let shared = Router::new()
        .nest("/sdapi/v1", sdapi::router().merge(extras::router()))
        .nest("/controlnet", controlnet::router())
        .nest("/internal", internal::router());
    let routes = Router::new()
        .merge(page::router())
        .nest("/api", jobs::router().merge(library::router()))
        .merge(shared.clone())
        .nest("/v1", shared.merge(openai::router()))
        .route("/metrics", get(numbers))
        .route("/openapi.json", get(async || axum::Json(document())))
        .fallback(async |uri: Uri| Fault::not_found(format!("there is nothing at {}", uri.path())))
        .method_not_allowed_fallback(async || {
            Fault::new(StatusCode::METHOD_NOT_ALLOWED, "method", "this address takes another method")
        })
        .with_state(app.clone())
        .layer(middleware::from_fn_with_state(app, guard::guard))
        .layer(CatchPanicLayer::custom(|_: Box<dyn std::any::Any + Send>| -> Response<Body> {
            Fault::internal("sdrun has a bug: see its log").into_response()
        }));
    // Addresses are changed before they choose a route.
    Router::new().fallback_service(routes).layer(middleware::map_request(single_slashes))
}

/// Some clients join addresses so that two slashes meet.
async fn single_slashes(mut request: Request) -> Request {
    let uri = request.uri();
    if !uri.path().contains("//") {
        return request;
    }
    let mut path = uri.path().to_string();
    while path.contains("//") {
        path = path.replace("//", "/");
    }
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    if let Ok(changed) = format!("{path}{query}").parse() {
        *request.uri_mut() = changed;
    }
    request
}

/// Numbers in Prometheus' text format
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = "text/plain", body = String)))]
async fn numbers(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.numbers()).into_response()
}

/// The OpenAPI document.
pub(crate) fn document() -> utoipa::openapi::OpenApi {
    #[derive(OpenApi)]
    #[openapi(
        info(
            title = "sdrun serve",
            description = "Draws pictures with diffusion models. `/api` is sdrun's own, `/v1/images` is OpenAI's, `/sdapi/v1` and \
                           `/controlnet` are A1111's. A1111's addresses and `/internal` also exist below `/v1`.",
            license(name = "MIT OR Apache-2.0")
        ),
        paths(
            jobs::create,
            jobs::list,
            jobs::show,
            jobs::cancel,
            jobs::events,
            jobs::picture,
            jobs::preview,
            library::show,
            library::refresh,
            library::model,
            library::metadata,
            openai::models,
            openai::generations,
            openai::edits,
            sdapi::txt2img,
            sdapi::img2img,
            sdapi::progress,
            sdapi::interrupt,
            sdapi::skip,
            sdapi::unload,
            sdapi::reload,
            sdapi::options,
            sdapi::set_options,
            sdapi::lists::samplers,
            sdapi::lists::schedulers,
            sdapi::lists::upscalers,
            sdapi::lists::latent_modes,
            sdapi::lists::models,
            sdapi::lists::vaes,
            sdapi::lists::loras,
            sdapi::lists::embeddings,
            sdapi::lists::memory,
            sdapi::lists::refresh,
            extras::single,
            extras::batch,
            extras::png_info,
            controlnet::models,
            controlnet::modules,
            controlnet::detect,
            internal::ping,
            internal::progress,
            numbers
        )
    )]
    struct Document;
    let mut document = Document::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    document
}
