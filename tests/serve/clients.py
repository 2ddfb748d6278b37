"""Real clients of `sdrun serve`, and the requests of others, replayed from their sources.

    python clients.py http://127.0.0.1:7860

Prints a line for each client, and fails at the first that does not get its picture.
"""

import base64
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request

from PIL import Image

PROMPT = "a red circle left of a blue square"


def call(url, body=None, method=None, headers=None, raw=False):
    """A request with a JSON body, or with none. Returns the status and the reply."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request) as reply:
            content, status = reply.read(), reply.status
    except urllib.error.HTTPError as error:
        content, status = error.read(), error.code
    return status, content if raw else json.loads(content or "null")


def picture(text):
    """The picture in a base64 text. Clients expect no prefix."""
    assert not text.startswith("data:")
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    image.load()
    return image.convert("RGB")


def is_the_scene(image):
    """Red on the left, blue on the right."""
    assert image.size == (64, 64), image.size

    def share(side, strong, weak):
        pixels = list(side.get_flattened_data() if hasattr(side, "get_flattened_data") else side.getdata())
        return sum(p[strong] > 150 and p[weak] < 120 for p in pixels) / len(pixels)

    left, right = image.crop((0, 0, 32, 64)), image.crop((32, 0, 64, 64))
    assert share(left, 0, 2) > 0.1 and share(right, 2, 0) > 0.1, (share(left, 0, 2), share(right, 2, 0))


def openai_package(base):
    from openai import BadRequestError, NotFoundError, OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key="none")
    assert "demo" in [model.id for model in client.models.list()]
    reply = client.images.generate(prompt=PROMPT, model="demo", n=2, size="64x64", extra_body={"seed": 7})
    images = [picture(image.b64_json) for image in reply.data]
    assert len(images) == 2
    is_the_scene(images[0])
    # Only the transparent part of the mask changes.
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (32, 0, 64, 64))
    files = []
    for image in (images[0], mask):
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    reply = client.images.edit(image=files[0], mask=files[1], prompt="a green star", size="64x64")
    edited = picture(reply.data[0].b64_json)
    assert edited.crop((0, 0, 16, 64)).tobytes() == images[0].crop((0, 0, 16, 64)).tobytes()
    assert edited.tobytes() != images[0].tobytes()
    reply = client.images.edit(image=[("a.png", files[0], "image/png")], prompt=PROMPT, response_format="b64_json")
    picture(reply.data[0].b64_json)
    for kind, arguments in [(NotFoundError, {"model": "sora"}), (BadRequestError, {"size": "7x7"})]:
        try:
            client.images.generate(prompt=PROMPT, **arguments)
            raise AssertionError(arguments)
        except kind as error:
            assert error.body["message"], error


def webuiapi_package(base):
    import webuiapi

    host, port = base.removeprefix("http://").split(":")
    api = webuiapi.WebUIApi(host=host, port=int(port))
    assert api.has_controlnet
    api.util_set_model("demo")
    assert api.util_get_current_model() == "demo"
    assert "Euler a" in [sampler["name"] for sampler in api.get_samplers()]
    assert api.get_loras()[0]["name"] == "outline"
    result = api.txt2img(prompt=PROMPT, seed=7, width=64, height=64, cfg_scale=2, sampler_name="DPM++ 2M", scheduler="karras")
    is_the_scene(result.image)
    assert result.info["seed"] == 7
    info = api.png_info(result.image)
    changed = api.img2img(images=[result.image], prompt=PROMPT, width=64, height=64, denoising_strength=0.5, seed=1)
    assert changed.image.tobytes() != result.image.tobytes()
    larger = api.extra_single_image(result.image, upscaler_1="Lanczos", upscaling_resize=2)
    assert larger.image.size == (128, 128)
    both = api.extra_batch_images([result.image, changed.image], upscaler_1="None", upscaling_resize=1.5)
    assert [image.size for image in both.images] == [(96, 96)] * 2
    edges = api.controlnet_detect([result.image], module="canny").image
    assert edges.size == (64, 64)
    unit = webuiapi.ControlNetUnit(image=edges, module="none", model="demo/canny", weight=1.0)
    followed = api.txt2img(prompt="a green circle", seed=3, width=64, height=64, controlnet_units=[unit])
    assert followed.image.size == (64, 64)
    api.util_wait_for_ready()
    for answer in (api.interrupt(), api.skip(), api.get_memory(), api.get_cmd_flags(), api.refresh_checkpoints()):
        assert answer is None or isinstance(answer, dict), answer
    try:
        api.txt2img(prompt=PROMPT, sampler_name="no such sampler")
        raise AssertionError("an unknown sampler")
    except RuntimeError as error:
        assert "no such sampler" in str(error), error
    assert info is not None


def open_webui(base):
    """backend/open_webui/routers/images.py: the engines `automatic1111` and `openai`."""
    # Settings with a slash at the end, and the header that an empty setting gives.
    url, headers = f"{base}/", {"authorization": "Basic "}
    status, options = call(f"{url}/sdapi/v1/options", headers=headers)
    assert status == 200 and options["sd_model_checkpoint"]
    status, models = call(f"{url}/sdapi/v1/sd-models", headers=headers)
    names = {model["title"]: model["model_name"] for model in models}
    assert options["sd_model_checkpoint"] in names
    options["sd_model_checkpoint"] = "demo"
    assert call(f"{url}/sdapi/v1/options", options, headers=headers) == (200, None)
    # It sends an empty name if none is set.
    assert call(f"{url}/sdapi/v1/options", {**options, "sd_model_checkpoint": ""}, headers=headers)[0] == 200
    body = {"prompt": PROMPT, "batch_size": 1, "width": 64, "height": 64, "steps": 20, "negative_prompt": "", "cfg_scale": 2, "seed": 7,
            "sampler_name": "DPM++ 2M", "scheduler": "Karras"}
    status, reply = call(f"{url}/sdapi/v1/txt2img", body, headers=headers)
    is_the_scene(picture(reply["images"][0]))
    assert json.loads(reply["info"])["all_seeds"] == [7]
    # The other engine, with its usual model.
    body = {"model": "dall-e-2", "prompt": PROMPT, "n": 1, "size": "64x64", "response_format": "b64_json"}
    status, reply = call(f"{base}/v1/images/generations", body, headers={"Authorization": "Bearer "})
    assert status == 200 and not reply["data"][0].get("url")
    source = base64.b64decode(reply["data"][0]["b64_json"])
    fields = [("model", ""), ("prompt", "a green star"), ("size", "64x64"), ("response_format", "b64_json")]
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields]
    parts.append(b'--x\r\nContent-Disposition: form-data; name="image[]"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n' + source + b"\r\n--x--\r\n")
    kind = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": "Bearer "}
    status, reply = call(f"{base}/v1/images/edits", b"".join(parts), headers=kind)
    assert status == 200, reply
    picture(reply["data"][0]["b64_json"])


def silly_tavern(base):
    """src/endpoints/stable-diffusion.js: the sources `auto` and `sdcpp`."""
    headers = {"Authorization": "Basic "}
    for path in ("samplers", "schedulers", "sd-models", "upscalers", "latent-upscale-modes", "sd-vae"):
        status, items = call(f"{base}/sdapi/v1/{path}", headers=headers)
        key = {"sd-models": "title", "sd-vae": "model_name"}.get(path, "name")
        assert status == 200 and all(item[key] for item in items), path
    assert call(f"{base}/sdapi/v1/upscalers")[1][0]["name"] == "None"
    assert call(f"{base}/sdapi/v1/sd-modules")[0] == 404
    assert call(f"{base}/sdapi/v1/options", {"sd_model_checkpoint": "demo"}, headers=headers)[0] == 200
    while True:
        progress = call(f"{base}/sdapi/v1/progress", headers=headers)[1]
        if progress["progress"] == 0 and progress["state"]["job_count"] == 0:
            break
    assert "forge_preset" not in call(f"{base}/sdapi/v1/options")[1]
    body = {"url": base, "auth": "me:secret", "prompt": PROMPT, "negative_prompt": "", "sampler_name": "DPM++ 2M", "scheduler": "karras",
            "steps": 20, "cfg_scale": 2, "width": 64, "height": 64, "seed": 7, "restore_faces": False, "enable_hr": False,
            "hr_upscaler": "Latent", "hr_scale": 1.0, "hr_additional_modules": [], "denoising_strength": 0.7, "hr_second_pass_steps": 0,
            "override_settings": {"CLIP_stop_at_last_layers": 1}, "override_settings_restore_afterwards": True, "clip_skip": 1,
            "save_images": True, "send_images": True, "do_not_save_grid": False, "do_not_save_samples": False}
    status, reply = call(f"{base}/sdapi/v1/txt2img", body, headers=headers)
    assert status == 200, reply
    is_the_scene(picture(reply["images"][0]))
    assert "secret" not in json.dumps(reply["parameters"])
    assert call(f"{base}/sdapi/v1/interrupt", b"", headers=headers)[0] == 200
    # stable-diffusion.cpp's names.
    assert call(f"{base}/v1/images/generations", method="OPTIONS", raw=True)[0] < 300
    assert "demo" in [model["id"] for model in call(f"{base}/v1/models")[1]["data"]]
    body = {"model": "demo", "prompt": PROMPT, "width": 64, "height": 64, "steps": 20, "cfg_scale": 2, "seed": 7, "batch_size": 1,
            "sampler_name": "dpm++2m", "scheduler": "karras"}
    is_the_scene(picture(call(f"{base}/sdapi/v1/txt2img", body)[1]["images"][0]))


def easy_diffusion(base):
    """ui/easydiffusion/backends/webui_common.py with the prefix `/v1` of its engine."""
    base = f"{base}/v1"
    assert call(f"{base}/internal/ping")[0] == 200
    options = {"show_progress_every_n_steps": 3, "show_progress_grid": True, "live_previews_enable": False, "forge_additional_modules": []}
    assert call(f"{base}/sdapi/v1/options", options)[0] == 200
    assert call(f"{base}/sdapi/v1/options")[1]["live_previews_enable"] is False
    assert call(f"{base}/sdapi/v1/options", {"sd_model_checkpoint": None, "forge_additional_modules": []})[0] == 200
    assert call(f"{base}/sdapi/v1/options", {"sd_model_checkpoint": "demo", "forge_additional_modules": []})[0] == 200
    for kind in ("checkpoints", "vae-and-text-encoders"):
        assert call(f"{base}/sdapi/v1/refresh-{kind}", b"")[0] == 200

    def draw(path, **more):
        body = {"force_task_id": f"task-{time.time()}", "prompt": f"{PROMPT}", "negative_prompt": "", "sampler_name": "DPM++ 2M",
                "scheduler": "karras", "steps": 20, "seed": 7, "cfg_scale": 2, "distilled_cfg_scale": 3.5, "batch_size": 1, "width": 64,
                "height": 64, **more}
        heard = []

        def listen():
            while True:
                asked = {"id_task": body["force_task_id"], "live_preview": True, "id_live_preview": heard[-1] if heard else -1}
                status, reply = call(f"{base}/internal/progress", asked)
                if status == 404:
                    time.sleep(0.02)
                    continue
                heard.append(reply["id_live_preview"])
                if reply["live_preview"]:
                    assert reply["live_preview"].startswith("data:image/jpeg;base64,")
                if reply["completed"]:
                    return

        thread = threading.Thread(target=listen)
        thread.start()
        status, reply = call(f"{base}/sdapi/v1/{path}", body)
        thread.join(60)
        assert status == 200 and not thread.is_alive(), reply
        assert json.loads(reply["info"])["infotexts"]
        return reply["images"]

    images = draw("txt2img")
    is_the_scene(picture(images[0]))
    # An older sampler has no name any more.
    assert len(draw("txt2img", sampler_name=None, prompt=f"{PROMPT} <lora:outline:0.8>")) == 1
    source = f"data:image/png;base64,{images[0]}"
    masked = {"mask": source, "include_init_images": True, "inpainting_fill": 1, "initial_noise_multiplier": 1, "inpaint_full_res": 0,
              "inpaint_full_res_padding": 32, "resize_mode": 1, "mask_blur": 4}
    picture(draw("img2img", init_images=[source], denoising_strength=0.8)[0])
    picture(draw("img2img", init_images=[source], denoising_strength=0.8, **masked)[0])
    unit = {"image": source, "weight": 1.0, "module": "canny", "model": "canny [0a1b2c3d]", "resize_mode": "Crop and Resize", "threshold_a": 50,
            "threshold_b": 130}
    picture(draw("txt2img", alwayson_scripts={"controlnet": {"args": [unit]}})[0])
    status, reply = call(f"{base}/controlnet/detect", {"controlnet_module": "canny", "controlnet_input_images": [source],
                                                     "controlnet_processor_res": 512, "controlnet_threshold_a": 64,
                                                     "controlnet_threshold_b": 64})
    picture(reply["images"][0])
    extras = {"resize_mode": 0, "show_extras_results": True, "gfpgan_visibility": 0, "codeformer_visibility": 0, "codeformer_weight": 0,
              "upscaling_resize": 2, "upscaling_resize_w": 512, "upscaling_resize_h": 512, "upscaling_crop": True, "upscaler_1": "Lanczos",
              "upscaler_2": "None", "extras_upscaler_2_visibility": 0, "upscale_first": False,
              "imageList": [{"data": source, "name": "image00001"}]}
    assert picture(call(f"{base}/sdapi/v1/extra-batch-images", extras)[1]["images"][0]).size == (128, 128)
    # Easy Diffusion shows this field of errors.
    status, reply = call(f"{base}/sdapi/v1/txt2img", {"prompt": "x", "sampler_name": "nothing"})
    assert status == 400 and reply["message"]


def main(base):
    for client in (openai_package, webuiapi_package, open_webui, silly_tavern, easy_diffusion):
        client(base)
        print(f"{client.__name__}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
