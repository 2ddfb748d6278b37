//! Texts in XMP data.

/// A1111's text that stable-diffusion.cpp puts into WebP files.
pub(super) fn parameters(xmp: &[u8]) -> Option<String> {
    let xmp = String::from_utf8_lossy(xmp);
    let (_, text) = xmp.split_once("<sdcpp:parameters>")?;
    let (text, _) = text.split_once("</sdcpp:parameters>")?;
    // XML's five names. "&" comes last, so that the text "&amp;lt;" becomes "&lt;".
    let names = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    Some(names.iter().fold(text.to_string(), |text, (name, sign)| text.replace(name, sign)))
}
