//! A1111's enlargement of pictures, and what their metadata tell.

use super::{
    body::{Sent, aside},
    openai::finished,
};
use crate::{
    app::App,
    fault::{Fault, SdFault},
    library::Library,
    pictures,
    task::{Enlarge, Output, Resized, Task},
};
use axum::{Json, Router, extract::State, routing::post};
use sdrun_diffusion::{
    file::JPEG_QUALITY,
    metadata::{Infotext, PARAMETERS},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

pub(super) fn router() -> Router<Arc<App>> {
    Router::new()
        .route("/extra-single-image", post(single))
        .route("/extra-batch-images", post(batch))
        .route("/png-info", post(png_info))
}

/// Pictures to enlarge. Settings that are not listed have no effect.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct Extras {
    /// The picture in base64.
    image: Option<String>,
    #[serde(rename = "imageList")]
    image_list: Vec<Named>,
    /// 0: a factor, 1: a size.
    resize_mode: Option<i64>,
    upscaling_resize: Option<f64>,
    upscaling_resize_w: Option<u32>,
    upscaling_resize_h: Option<u32>,
    upscaling_crop: Option<bool>,
    /// A name of `/sdapi/v1/upscalers`.
    upscaler_1: Option<String>,
    upscaler_2: Option<String>,
    extras_upscaler_2_visibility: Option<f64>,
    gfpgan_visibility: Option<f64>,
    codeformer_visibility: Option<f64>,
}

/// A picture with a name.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
struct Named {
    /// The picture in base64.
    data: String,
}

/// Enlarge a picture
#[utoipa::path(post, path = "/sdapi/v1/extra-single-image", request_body = Extras, responses(
    (status = 200, body = Object), (status = 400), (status = 404), (status = 413), (status = 422), (status = 429)))]
pub(super) async fn single(
    State(app): State<Arc<App>>,
    Sent(extras, _): Sent<Extras, SdFault>,
) -> Result<Json<Value>, SdFault> {
    let image = extras.image.clone().ok_or_else(|| Fault::invalid("there is no `image`"))?;
    let image = enlarged(&app, &extras, image).await?;
    Ok(Json(json!({ "html_info": "", "image": image })))
}

/// Enlarge pictures
#[utoipa::path(post, path = "/sdapi/v1/extra-batch-images", request_body = Extras, responses(
    (status = 200, body = Object), (status = 400), (status = 404), (status = 413), (status = 422), (status = 429)))]
pub(super) async fn batch(
    State(app): State<Arc<App>>,
    Sent(mut extras, _): Sent<Extras, SdFault>,
) -> Result<Json<Value>, SdFault> {
    let list = std::mem::take(&mut extras.image_list);
    if list.is_empty() {
        return Err(Fault::invalid("there is no `imageList`, or it is empty").into());
    }
    let mut images = Vec::new();
    for Named { data } in list {
        images.push(enlarged(&app, &extras, data).await?);
    }
    Ok(Json(json!({ "html_info": "", "images": images })))
}

async fn enlarged(app: &Arc<App>, extras: &Extras, image: String) -> Result<String, Fault> {
    let (extras, shared) = (extras.clone(), app.clone());
    let task = aside(move || {
        let format = shared.options().format()?;
        extras.task(&shared.library, &image, Output { format, quality: JPEG_QUALITY, previews: false })
    });
    let status = app.run(Task::Enlarge(Box::new(task.await?)), None).await?;
    finished(&status)?;
    let drawn = status.pictures.first().ok_or_else(|| Fault::internal("there is no picture"))?;
    Ok(pictures::encode(&drawn.bytes))
}

impl Extras {
    fn task(&self, library: &Library, image: &str, output: Output) -> Result<Enlarge, Fault> {
        let positive = |share: Option<f64>| share.is_some_and(|share| share > 0.0);
        if positive(self.gfpgan_visibility) || positive(self.codeformer_visibility) {
            return Err(Fault::unsupported("sdrun cannot restore faces"));
        }
        let plain = |name: &&String| !["", "none", "lanczos"].contains(&&*name.to_lowercase());
        let second = self.upscaler_2.as_ref().filter(plain);
        if second.is_some() && positive(self.extras_upscaler_2_visibility) {
            return Err(Fault::unsupported("sdrun cannot mix two upscalers: leave out upscaler_2"));
        }
        let name = self.upscaler_1.as_ref().filter(plain);
        let size = match self.resize_mode.unwrap_or(0) {
            0 => {
                let factor = self.upscaling_resize.unwrap_or(2.0);
                if !(factor > 0.0 && factor <= 16.0) {
                    return Err(Fault::invalid(format!("upscaling_resize {factor} is not from 0 to 16")));
                }
                Resized::Factor(factor)
            }
            1 => {
                let side = |pixels: Option<u32>| pixels.unwrap_or(512);
                let (width, height) = (side(self.upscaling_resize_w), side(self.upscaling_resize_h));
                if width == 0 || height == 0 {
                    return Err(Fault::invalid("a picture has at least one pixel in each direction"));
                }
                Resized::Pixels(width, height, self.upscaling_crop.unwrap_or(true))
            }
            other => return Err(Fault::invalid(format!("resize_mode is 0 or 1, not {other}"))),
        };
        let file = pictures::decode("image", image)?;
        let upscaler = name.map(|name| library.upscaler(name)).transpose()?.map(|entry| entry.path);
        Ok(Enlarge { picture: file.rgb(), texts: file.texts, upscaler, size, output })
    }
}

/// A picture with metadata.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct Info {
    /// The picture in base64.
    image: String,
}

/// What a picture tells about its making
#[utoipa::path(post, path = "/sdapi/v1/png-info", request_body = Info, responses(
    (status = 200, body = Object), (status = 400), (status = 413)))]
pub(super) async fn png_info(Sent(sent, _): Sent<Info, SdFault>) -> Result<Json<Value>, SdFault> {
    let texts = aside(move || Ok(pictures::decode("image", &sent.image)?.texts)).await?;
    let info = texts.iter().find(|(key, _)| key == PARAMETERS).map_or("", |(_, text)| text.as_str());
    let Infotext { prompt, negative, settings } = Infotext::parse(info);
    let mut parameters: Map<String, Value> =
        settings.into_iter().map(|(name, value)| (name, value.into())).collect();
    if !info.is_empty() {
        parameters.insert("Prompt".into(), prompt.into());
        parameters.insert("Negative prompt".into(), negative.into());
    }
    let items: Map<String, Value> =
        texts.iter().map(|(key, text)| (key.clone(), text.clone().into())).collect();
    Ok(Json(json!({ "info": info, "items": items, "parameters": parameters })))
}
