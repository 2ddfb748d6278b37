//! What may be named in orders, and what pictures tell about their making.

use super::body::{aside, bytes};
use crate::{app::App, fault::Fault, library::Listing, order::Order, pictures};
use axum::{
    Json, Router,
    extract::{Path, Request, State},
    routing::{get, post},
};
use sdrun::TracingHost;
use sdrun_diffusion::{
    metadata::read_record,
    names,
    picture::Hint,
    pipeline::{self, Parts},
    sampler::Sampler,
    schedule::Schedule,
};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new()
        .route("/library", get(show))
        .route("/library/refresh", post(refresh))
        .route("/models/{name}", get(model))
        .route("/metadata", post(metadata))
}

/// What may be named in orders.
#[derive(Serialize, ToSchema)]
pub(super) struct Names {
    #[serde(flatten)]
    files: Listing,
    default_model: String,
    samplers: Vec<Label>,
    schedules: Vec<Label>,
    hints: Vec<&'static str>,
    version: &'static str,
}

/// A name for orders, and one for people.
#[derive(Serialize, ToSchema)]
struct Label {
    name: &'static str,
    label: &'static str,
}

fn names_of(app: &App, files: &Listing) -> Names {
    let model = app.model();
    let entry = app.library.model(&model);
    let samplers = names::samplers().filter_map(|name| {
        let (sampler, _): (Sampler, _) = names::sampler(name)?;
        Some(Label { name, label: sampler.label() })
    });
    let schedules = names::schedules().filter_map(|name| {
        let schedule: Schedule = names::schedule(name)?;
        Some(Label { name, label: schedule.label() })
    });
    Names {
        files: files.clone(),
        default_model: entry.map_or(model, |entry| entry.name),
        samplers: samplers.collect(),
        schedules: schedules.collect(),
        hints: Hint::names().collect(),
        version: env!("CARGO_PKG_VERSION"),
    }
}

/// What may be named in orders
#[utoipa::path(get, path = "/api/library", responses((status = 200, body = Names)))]
pub(super) async fn show(State(app): State<Arc<App>>) -> Json<Names> {
    Json(names_of(&app, &app.library.listing()))
}

/// The same, after reading the folders again
#[utoipa::path(post, path = "/api/library/refresh", responses((status = 200, body = Names)))]
pub(super) async fn refresh(State(app): State<Arc<App>>) -> Result<Json<Names>, Fault> {
    aside(move || {
        let files = app.library.refresh()?;
        Ok(Json(names_of(&app, &files)))
    })
    .await
}

/// A model and the usual values of its family.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelView {
    name: String,
    family: &'static str,
    /// The family's name for people.
    title: &'static str,
    width: usize,
    height: usize,
    /// Sides are multiples of this.
    multiple: usize,
    steps: usize,
    cfg_scale: f64,
    /// Guidance that the model takes as an input, if it does.
    guidance: Option<f64>,
    sampler: &'static str,
    schedule: &'static str,
}

/// A model and the usual values of its family
#[utoipa::path(get, path = "/api/models/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = ModelView), (status = 404), (status = 422)))]
pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<ModelView>, Fault> {
    aside(move || {
        let entry = app.library.model(&name)?;
        let files = app.library.files(&entry.title, None, &[])?;
        let family = match Parts::open(&files, &app.library.paths, &TracingHost) {
            Ok(parts) => parts.family,
            // Text encoders may come from other files.
            Err(pipeline::Error::Missing { family, .. }) => family,
            Err(error) => return Err(error.into()),
        };
        let defaults = &family.defaults;
        Ok(Json(ModelView {
            name: entry.name,
            family: family.id,
            title: family.title,
            width: family.size,
            height: family.size,
            multiple: family.multiple,
            steps: defaults.steps,
            cfg_scale: defaults.scale,
            guidance: family.distilled_guidance,
            sampler: defaults.sampler.name(),
            schedule: defaults.schedule.name(),
        }))
    })
    .await
}

/// What a picture tells about its making.
#[derive(Serialize, ToSchema)]
pub(super) struct Metadata {
    /// An order for the same picture, without pictures as inputs.
    order: Order,
    /// A1111's text of the settings.
    parameters: String,
    /// Sentences about settings that sdrun does not know.
    unread: Vec<String>,
    /// Whether the library has the model.
    model_found: bool,
}

/// What a picture tells about its making
#[utoipa::path(post, path = "/api/metadata", request_body(content = Vec<u8>, content_type = "image/png"), responses(
    (status = 200, body = Metadata), (status = 400), (status = 413), (status = 422)))]
pub(super) async fn metadata(State(app): State<Arc<App>>, request: Request) -> Result<Json<Metadata>, Fault> {
    let bytes = bytes(request).await?;
    aside(move || {
        let file = pictures::of_bytes("the file", &bytes)?;
        let reading = read_record(&file.texts).map_err(|why| Fault::unsupported(why.to_string()))?;
        let mut order = Order::of_record(&reading.record);
        let found = order.model.as_deref().and_then(|name| app.library.model(name).ok());
        let (mut unread, model_found) = (reading.unread, found.is_some());
        match (found, &order.model) {
            (Some(entry), _) => order.model = Some(entry.name),
            (None, Some(name)) => unread.push(format!("the model {name} is not in the library")),
            (None, None) => {}
        }
        Ok(Json(Metadata { order, parameters: reading.record.infotext().to_string(), unread, model_found }))
    })
    .await
}
