//! The API of A1111's extension for ControlNets.

use super::body::{Sent, aside};
use crate::{
    app::App,
    fault::{Fault, SdFault},
    pictures,
};
use axum::{
    Json, Router,
    extract::State,
    routing::{get, post},
};
use sdrun_diffusion::{
    file::{self, Format, JPEG_QUALITY},
    picture::{Fit, Hint},
    pipeline::{self, named},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new()
        .route("/version", get(async || Json(json!({ "version": 3 }))))
        .route("/settings", get(async || Json(json!({ "control_net_unit_count": 10 }))))
        .route("/model_list", get(models))
        .route("/module_list", get(modules))
        .route("/control_types", get(types))
        .route("/detect", post(detect))
}

fn model_list(app: &App) -> Vec<String> {
    let listing = app.library.listing();
    let names = listing.control_nets.iter().map(|entry| entry.name.clone());
    std::iter::once("None".to_string()).chain(names).collect()
}

/// The ControlNets of the library
#[utoipa::path(get, path = "/controlnet/model_list", responses((status = 200, body = Object)))]
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "model_list": model_list(&app) }))
}

/// What can be made of pictures for ControlNets
#[utoipa::path(get, path = "/controlnet/module_list", responses((status = 200, body = Object)))]
pub(super) async fn modules() -> Json<Value> {
    Json(json!({ "module_list": Hint::names().collect::<Vec<_>>() }))
}

async fn types(State(app): State<Arc<App>>) -> Json<Value> {
    let all = json!({
        "module_list": Hint::names().collect::<Vec<_>>(),
        "model_list": model_list(&app),
        "default_option": "none",
        "default_model": "None",
    });
    Json(json!({ "control_types": { "All": all } }))
}

/// Pictures to make something of.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct Detect {
    controlnet_module: Option<String>,
    controlnet_input_images: Vec<String>,
    /// An older name of the same.
    controlnet_images: Vec<String>,
    controlnet_threshold_a: Option<f64>,
    controlnet_threshold_b: Option<f64>,
}

/// Make something of pictures for ControlNets
#[utoipa::path(post, path = "/controlnet/detect", request_body = Detect, responses(
    (status = 200, body = Object), (status = 400), (status = 413)))]
pub(super) async fn detect(Sent(asked, _): Sent<Detect, SdFault>) -> Result<Json<Value>, SdFault> {
    let images = aside(move || {
        let name = asked.controlnet_module.as_deref().unwrap_or("none");
        let hint = module(name, asked.controlnet_threshold_a, asked.controlnet_threshold_b)?;
        let texts = asked.controlnet_input_images.iter().chain(&asked.controlnet_images);
        let images = texts.map(|text| {
            let picture = pictures::decode("controlnet_input_images", text)?.rgb();
            let (width, height) = picture.dimensions();
            let made = hint.picture(&picture, Fit::Stretch, width, height).map_err(pipeline::Error::from)?;
            let bytes = file::encode(Format::Png, &made, JPEG_QUALITY, &[]);
            let bytes =
                bytes.map_err(|why| Fault::invalid(format!("the picture cannot be stored: {why}")))?;
            Ok(pictures::encode(&bytes))
        });
        let images = images.collect::<Result<Vec<_>, Fault>>()?;
        if images.is_empty() {
            return Err(Fault::invalid("no image was sent"));
        }
        Ok(images)
    });
    Ok(Json(json!({ "images": images.await?, "info": "Success" })))
}

/// A hint by a name of A1111, with its thresholds.
pub(super) fn module(name: &str, a: Option<f64>, b: Option<f64>) -> Result<Hint, Fault> {
    let within = |value: Option<f64>| value.filter(|value| (0.0..=255.0).contains(value));
    Ok(match (named::hint(name)?, within(a), within(b)) {
        (Hint::Canny { .. }, Some(low), Some(high)) => Hint::Canny { low: low as u16, high: high as u16 },
        (Hint::Threshold { .. }, Some(above), _) => Hint::Threshold { above: above as u8 },
        (hint, ..) => hint,
    })
}
