//! Why a request gets no answer, in the form of each API.

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use sdrun::abi::ErrorCode;
use sdrun_diffusion::pipeline;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

/// Why a job or a request failed.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct Fault {
    /// HTTP's number for it.
    #[serde(skip)]
    pub(crate) status: u16,
    /// A name for programs, such as `not_found`.
    pub(crate) code: &'static str,
    /// One sentence.
    pub(crate) message: String,
    /// What to do about it.
    pub(crate) hint: Option<String>,
}

impl Fault {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Fault { status: status.as_u16(), code, message: message.into(), hint: None }
    }

    /// A wrong request.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    /// A named thing that does not exist.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// Something that sdrun cannot do.
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "unsupported", message)
    }

    pub(crate) fn cancelled() -> Self {
        Self::new(StatusCode::CONFLICT, "cancelled", "the job was cancelled")
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    pub(crate) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn of(code: ErrorCode, message: String, hint: Option<String>) -> Self {
        let (status, code) = match code {
            ErrorCode::InvalidArgument | ErrorCode::OutOfRange | ErrorCode::AlreadyExists => (400, "invalid"),
            ErrorCode::NotFound => (404, "not_found"),
            ErrorCode::Unimplemented => (422, "unsupported"),
            ErrorCode::Cancelled => (409, "cancelled"),
            ErrorCode::ResourceExhausted => (507, "out_of_memory"),
            ErrorCode::DeadlineExceeded => (504, "too_slow"),
            ErrorCode::DataLoss => (500, "damaged_file"),
            ErrorCode::FailedPrecondition => (503, "not_ready"),
            ErrorCode::Unavailable => (500, "provider_gone"),
            _ => (500, "internal"),
        };
        Fault { status, code, message, hint }
    }
}

impl From<pipeline::Error> for Fault {
    fn from(error: pipeline::Error) -> Self {
        Self::of(error.code(), error.to_string(), error.hint().map(|hint| hint.to_string()))
    }
}

impl From<sdrun::Error> for Fault {
    fn from(error: sdrun::Error) -> Self {
        Self::of(error.code(), error.to_string(), error.hint().map(|hint| hint.to_string()))
    }
}

impl From<sdrun::abi::Error> for Fault {
    fn from(error: sdrun::abi::Error) -> Self {
        sdrun::Error::from(error).into()
    }
}

/// A fault in sdrun's own form.
impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        reply(&self, json!({ "error": self }))
    }
}

/// A fault in OpenAI's form.
pub(crate) struct OpenAiFault(pub(crate) Fault);

impl From<Fault> for OpenAiFault {
    fn from(fault: Fault) -> Self {
        OpenAiFault(fault)
    }
}

impl IntoResponse for OpenAiFault {
    fn into_response(self) -> Response {
        let Fault { code, message, hint, .. } = &self.0;
        let message = sentence(message, hint.as_deref());
        let kind = if self.0.status < 500 { "invalid_request_error" } else { "server_error" };
        reply(&self.0, json!({ "error": { "message": message, "type": kind, "param": null, "code": code } }))
    }
}

/// A fault in A1111's form. Easy Diffusion shows `message`.
pub(crate) struct SdFault(pub(crate) Fault);

impl From<Fault> for SdFault {
    fn from(fault: Fault) -> Self {
        SdFault(fault)
    }
}

impl IntoResponse for SdFault {
    fn into_response(self) -> Response {
        let Fault { code, message, hint, .. } = &self.0;
        let message = sentence(message, hint.as_deref());
        reply(
            &self.0,
            json!({ "error": code, "detail": message, "body": "", "errors": message, "message": message }),
        )
    }
}

fn sentence(message: &str, hint: Option<&str>) -> String {
    hint.map_or(message.to_string(), |hint| format!("{message} ({hint})"))
}

fn reply(fault: &Fault, body: serde_json::Value) -> Response {
    let mut response = (fault.status(), Json(body)).into_response();
    let headers = response.headers_mut();
    // OpenAI's clients repeat a request after 409, 429 and 5xx. Only a full queue will be better soon.
    let again = HeaderValue::from_static(if fault.status == 429 { "true" } else { "false" });
    headers.insert(HeaderName::from_static("x-should-retry"), again);
    if fault.status == 429 {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
    }
    if fault.status == 401 {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"sdrun\""));
    }
    response
}
