//! A1111's API, as far as its clients use it.

pub(super) mod lists;
mod settings;
mod wish;

pub(crate) use settings::Settings;

use super::{
    body::{Sent, aside},
    openai::finished,
};
use crate::{
    app::App,
    fault::{Fault, SdFault},
    job::{State as JobState, Status},
    pictures,
    task::Task,
};
use axum::{
    Json, Router,
    extract::{Query, State},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::IntoParams;
use wish::Wish;

pub(super) fn router() -> Router<Arc<App>> {
    lists::router()
        .route("/txt2img", post(txt2img))
        .route("/img2img", post(img2img))
        .route("/progress", get(progress))
        .route("/interrupt", post(interrupt))
        .route("/skip", post(skip))
        .route("/options", get(options).post(set_options))
        .route("/unload-checkpoint", post(unload))
        .route("/reload-checkpoint", post(reload))
        .route(
            "/interrogate",
            post(async || SdFault(Fault::unsupported("sdrun draws pictures and cannot describe them"))),
        )
}

/// Draw pictures
#[utoipa::path(post, path = "/sdapi/v1/txt2img", request_body = Wish, responses(
    (status = 200, body = Object), (status = 400), (status = 404), (status = 413), (status = 422), (status = 429)))]
pub(super) async fn txt2img(
    State(app): State<Arc<App>>,
    Sent(wish, _): Sent<Value, SdFault>,
) -> Result<Json<Value>, SdFault> {
    Ok(run(&app, wish, false).await?)
}

/// Change a picture
#[utoipa::path(post, path = "/sdapi/v1/img2img", request_body = Wish, responses(
    (status = 200, body = Object), (status = 400), (status = 404), (status = 413), (status = 422), (status = 429)))]
pub(super) async fn img2img(
    State(app): State<Arc<App>>,
    Sent(wish, _): Sent<Value, SdFault>,
) -> Result<Json<Value>, SdFault> {
    Ok(run(&app, wish, true).await?)
}

async fn run(app: &Arc<App>, sent: Value, from_picture: bool) -> Result<Json<Value>, Fault> {
    let Value::Object(mut echo) = sent else {
        return Err(Fault::invalid("the body is not a JSON object"));
    };
    let shared = app.clone();
    let (draw, wish, mut echo) = aside(move || {
        let wish = Wish::read(&echo)?;
        let settings = {
            let mut options = shared.options();
            let changed = options.with(&wish.override_settings, &shared.library)?;
            if wish.keeps_settings() {
                options.clone_from(&changed);
            }
            changed
        };
        let draw = wish.draw(&shared.library, &settings, from_picture)?;
        // Pictures are not sent back.
        for name in ["init_images", "mask", "ref_images", "alwayson_scripts"] {
            echo.remove(name);
        }
        Ok((draw, wish, echo))
    })
    .await?;
    let sends = wish.send_images.unwrap_or(true);
    let status = app.run(Task::Draw(Box::new(draw)), wish.force_task_id).await?;
    // After an interrupt, clients get what is done.
    if status.state != JobState::Cancelled {
        finished(&status)?;
    }
    let images: Vec<String> =
        status.pictures.iter().filter(|_| sends).map(|drawn| pictures::encode(&drawn.bytes)).collect();
    let info = info(&status);
    echo.retain(|name, _| name != "auth");
    Ok(Json(json!({ "images": images, "parameters": echo, "info": info.to_string() })))
}

/// What A1111 tells about pictures, and the networks that ran.
fn info(status: &Status) -> Value {
    let records: Vec<_> = status.pictures.iter().filter_map(|drawn| drawn.record.as_ref()).collect();
    let first = records.first();
    let seeds: Vec<_> = records.iter().map(|record| record.seed).collect();
    let others = |record: &sdrun_diffusion::metadata::Record| record.variation.map_or(0, |other| other.seed);
    let prompts: Vec<&str> = records.iter().map(|record| record.prompt.as_str()).collect();
    let negatives: Vec<&str> = records.iter().map(|record| record.negative.as_str()).collect();
    let model = first.and_then(|record| record.model.as_ref());
    json!({
        "prompt": prompts.first().unwrap_or(&""),
        "all_prompts": prompts,
        "negative_prompt": negatives.first().unwrap_or(&""),
        "all_negative_prompts": negatives,
        "seed": seeds.first().copied().flatten(),
        "all_seeds": seeds,
        "subseed": first.map_or(0, |record| others(record)),
        "all_subseeds": records.iter().map(|record| others(record)).collect::<Vec<_>>(),
        "subseed_strength": first.and_then(|record| record.variation).map_or(0.0, |other| other.strength),
        "width": first.and_then(|record| record.width),
        "height": first.and_then(|record| record.height),
        "sampler_name": first.and_then(|record| record.sampler).map(|sampler| sampler.label()),
        "cfg_scale": first.and_then(|record| record.cfg_scale),
        "steps": first.and_then(|record| record.steps),
        "batch_size": records.len(),
        "sd_model_name": model.map(|model| model.name.as_str()),
        "sd_model_hash": model.and_then(|model| model.hash.as_deref()),
        "denoising_strength": first.and_then(|record| record.denoising_strength),
        "clip_skip": first.map(|record| record.clip_skip.unwrap_or(1)),
        "index_of_first_image": 0,
        "infotexts": status.pictures.iter().map(|drawn| drawn.parameters.as_str()).collect::<Vec<_>>(),
        "extra_generation_params": {},
        "warnings": status.warnings,
        "networks": status.networks,
        "version": concat!("sdrun ", env!("CARGO_PKG_VERSION")),
    })
}

/// Whether to leave the picture out.
#[derive(Debug, Deserialize, IntoParams)]
pub(super) struct ProgressQuery {
    skip_current_image: Option<String>,
}

/// How far the current job is
#[utoipa::path(get, path = "/sdapi/v1/progress", params(ProgressQuery), responses((status = 200, body = Object)))]
pub(super) async fn progress(
    State(app): State<Arc<App>>,
    Query(ProgressQuery { skip_current_image: skip }): Query<ProgressQuery>,
) -> Json<Value> {
    let job = app.current();
    let status = job.as_ref().map(|job| job.status()).unwrap_or_default();
    let share = if status.total > 0 { status.done as f64 / status.total as f64 } else { 0.0 };
    let waiting: usize = app.queues().iter().map(|queue| queue.waiting()).sum();
    let skips = skip.is_some_and(|text| text.eq_ignore_ascii_case("true") || text == "1");
    let image = status.preview.filter(|_| !skips).map(|(_, bytes)| pictures::encode(&bytes));
    Json(json!({
        // Clients take 0 for idle.
        "progress": if job.is_some() { share.max(0.01) } else { 0.0 },
        "eta_relative": status.seconds_left.unwrap_or(0.0),
        "state": {
            "skipped": job.as_ref().is_some_and(|job| job.is_skipped()),
            "interrupted": job.as_ref().is_some_and(|job| job.is_cancelled()),
            "stopping_generation": false,
            "job": status.phase,
            "job_count": waiting + status.count.saturating_sub(status.pictures.len()),
            "job_timestamp": "0",
            "job_no": status.pictures.len(),
            "sampling_step": status.step.0,
            "sampling_steps": status.step.1,
        },
        "current_image": image,
        "textinfo": status.phase,
    }))
}

/// Stop the current job; its client gets the pictures that are done
#[utoipa::path(post, path = "/sdapi/v1/interrupt", responses((status = 200, body = Object)))]
pub(super) async fn interrupt(State(app): State<Arc<App>>) -> Json<Value> {
    if let Some(job) = app.current() {
        app.cancel(&job);
    }
    Json(json!({}))
}

/// Leave out the rest of the current picture
#[utoipa::path(post, path = "/sdapi/v1/skip", responses((status = 200, body = Object)))]
pub(super) async fn skip(State(app): State<Arc<App>>) -> Json<Value> {
    if let Some(job) = app.current() {
        job.skip();
    }
    Json(json!({}))
}

/// Free the memory of the networks that are loaded, after the jobs that wait
#[utoipa::path(post, path = "/sdapi/v1/unload-checkpoint", responses((status = 200, body = Object), (status = 429)))]
pub(super) async fn unload(State(app): State<Arc<App>>) -> Result<Json<Value>, SdFault> {
    app.unload()?;
    Ok(Json(json!({})))
}

/// Nothing: the next job loads the networks it needs
#[utoipa::path(post, path = "/sdapi/v1/reload-checkpoint", responses((status = 200, body = Object)))]
pub(super) async fn reload() -> Json<Value> {
    Json(json!({}))
}

/// The settings that clients share
#[utoipa::path(get, path = "/sdapi/v1/options", responses((status = 200, body = Object)))]
pub(super) async fn options(State(app): State<Arc<App>>) -> Json<Value> {
    let (model, mut all) = (app.model(), app.options().all());
    all.insert("sd_model_checkpoint".into(), model.into());
    Json(Value::Object(all))
}

/// Change settings; another checkpoint is a refit in the next job
#[utoipa::path(post, path = "/sdapi/v1/options", request_body = Object, responses(
    (status = 200), (status = 400), (status = 404), (status = 413)))]
pub(super) async fn set_options(
    State(app): State<Arc<App>>,
    Sent(changes, _): Sent<Map<String, Value>, SdFault>,
) -> Result<Json<Value>, SdFault> {
    let changed = aside(move || {
        let mut options = app.options();
        let changed = options.with(&changes, &app.library)?;
        options.clone_from(&changed);
        Ok(Json(Value::Null))
    });
    Ok(changed.await?)
}
