//! What A1111's clients can choose from.

use super::super::body::aside;
use crate::{app::App, fault::SdFault, library::Entry, metrics::resident};
use axum::{
    Json, Router,
    extract::State,
    routing::{get, post},
};
use sdrun_diffusion::{names, sampler::Sampler};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn router() -> Router<Arc<App>> {
    let none = || get(async || Json(json!([])));
    Router::new()
        .route("/samplers", get(samplers))
        .route("/schedulers", get(schedulers))
        .route("/upscalers", get(upscalers))
        .route("/latent-upscale-modes", get(latent_modes))
        .route("/sd-models", get(models))
        .route("/sd-vae", get(vaes))
        .route("/loras", get(loras))
        .route("/embeddings", get(embeddings))
        .route("/memory", get(memory))
        .route("/cmd-flags", get(async || Json(json!({ "api": true }))))
        .route("/scripts", get(scripts))
        .route("/script-info", none())
        .route("/prompt-styles", none())
        .route("/face-restorers", none())
        .route("/realesrgan-models", get(realesrgan))
        .route("/hypernetworks", none())
        .route("/extensions", none())
        .route("/refresh-checkpoints", post(refresh))
        .route("/refresh-vae", post(refresh))
        .route("/refresh-embeddings", post(refresh))
        .route("/refresh-loras", post(refresh))
        .route("/refresh-vae-and-text-encoders", post(refresh))
}

/// A list with an entry for each file.
fn files(entries: &[Entry], one: impl Fn(&Entry) -> Value) -> Json<Value> {
    Json(Value::Array(entries.iter().map(one).collect()))
}

/// The samplers
#[utoipa::path(get, path = "/sdapi/v1/samplers", responses((status = 200, body = Object)))]
pub(in crate::api) async fn samplers() -> Json<Value> {
    let one =
        |sampler: &Sampler| json!({ "name": sampler.label(), "aliases": [sampler.name()], "options": {} });
    Json(Value::Array(Sampler::ALL.iter().map(one).collect()))
}

/// The schedules
#[utoipa::path(get, path = "/sdapi/v1/schedulers", responses((status = 200, body = Object)))]
pub(in crate::api) async fn schedulers() -> Json<Value> {
    let entry = |name: &str, label: &str| json!({ "name": name, "label": label, "aliases": [], "default_rho": -1.0, "need_inner_model": false });
    let known = names::schedules().filter_map(|name| Some(entry(name, names::schedule(name)?.label())));
    Json(Value::Array(std::iter::once(entry("automatic", "Automatic")).chain(known).collect()))
}

/// What enlarges pictures
#[utoipa::path(get, path = "/sdapi/v1/upscalers", responses((status = 200, body = Object)))]
pub(in crate::api) async fn upscalers(State(app): State<Arc<App>>) -> Json<Value> {
    let entry = |name: &str| json!({ "name": name, "model_name": null, "model_path": null, "model_url": null, "scale": 4.0 });
    let listing = app.library.listing();
    let networks = listing.upscalers.iter().map(|file| entry(&file.name));
    Json(Value::Array(["None", "Lanczos"].iter().map(|name| entry(name)).chain(networks).collect()))
}

/// How latents are enlarged between two passes
#[utoipa::path(get, path = "/sdapi/v1/latent-upscale-modes", responses((status = 200, body = Object)))]
pub(in crate::api) async fn latent_modes() -> Json<Value> {
    Json(json!([{ "name": "Latent" }]))
}

/// The models of the library
#[utoipa::path(get, path = "/sdapi/v1/sd-models", responses((status = 200, body = Object)))]
pub(in crate::api) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    files(&app.library.listing().models, |entry| {
        let name = entry.name.rsplit('/').next().unwrap_or_default();
        json!({ "title": entry.title, "model_name": name, "hash": null, "sha256": null,
                "filename": entry.title, "config": null })
    })
}

/// The autoencoders of the library
#[utoipa::path(get, path = "/sdapi/v1/sd-vae", responses((status = 200, body = Object)))]
pub(in crate::api) async fn vaes(State(app): State<Arc<App>>) -> Json<Value> {
    files(&app.library.listing().vaes, |entry| json!({ "model_name": entry.title, "filename": entry.title }))
}

/// The adapters of the library
#[utoipa::path(get, path = "/sdapi/v1/loras", responses((status = 200, body = Object)))]
pub(in crate::api) async fn loras(State(app): State<Arc<App>>) -> Json<Value> {
    files(&app.library.listing().loras, |entry| {
        let name = entry.name.rsplit('/').next().unwrap_or_default();
        json!({ "name": name, "alias": name, "path": entry.title, "metadata": {} })
    })
}

/// The embeddings of the library
#[utoipa::path(get, path = "/sdapi/v1/embeddings", responses((status = 200, body = Object)))]
pub(in crate::api) async fn embeddings(State(app): State<Arc<App>>) -> Json<Value> {
    let listing = app.library.listing();
    let one = |entry: &Entry| (entry.name.clone(), json!({ "step": null, "sd_checkpoint": null }));
    let loaded: serde_json::Map<String, Value> = listing.embeddings.iter().map(one).collect();
    Json(json!({ "loaded": loaded, "skipped": {} }))
}

async fn realesrgan(State(app): State<Arc<App>>) -> Json<Value> {
    files(
        &app.library.listing().upscalers,
        |entry| json!({ "name": entry.name, "path": entry.title, "scale": 4 }),
    )
}

/// The package `webuiapi` knows by `controlnet m2m` that there are ControlNets.
async fn scripts() -> Json<Value> {
    Json(json!({ "txt2img": ["controlnet m2m"], "img2img": ["controlnet m2m"] }))
}

/// Memory in bytes
#[utoipa::path(get, path = "/sdapi/v1/memory", responses((status = 200, body = Object)))]
pub(in crate::api) async fn memory() -> Json<Value> {
    let (used, free) = (resident().unwrap_or(0), sdrun::memory::available().unwrap_or(0));
    let ram = json!({ "free": free, "used": used, "total": free.saturating_add(used) });
    Json(json!({ "ram": ram, "cuda": { "error": "unavailable" } }))
}

/// Read the folders again
#[utoipa::path(post, path = "/sdapi/v1/refresh-checkpoints", responses((status = 200), (status = 404)))]
pub(in crate::api) async fn refresh(State(app): State<Arc<App>>) -> Result<Json<Value>, SdFault> {
    aside(move || app.library.refresh().map(drop).map_err(Into::into)).await?;
    Ok(Json(Value::Null))
}
