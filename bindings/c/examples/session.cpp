// Runs a network from C++, replaces its weights, and lists the devices.
//
//     c++ -std=c++17 session.cpp -o session $(pkg-config --cflags --libs sdrun)

#include <sdrun.h>

#include <cmath>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(sdrun_failure *failure) {
  if (failure == nullptr) {
    return;
  }
  const std::string message = sdrun_failure_message(failure);
  sdrun_failure_free(failure);
  throw std::runtime_error(message);
}

template <typename T, void (*Free)(T *)>
struct Freed {
  void operator()(T *object) const { Free(object); }
};
using Registry = std::unique_ptr<sdrun_registry, Freed<sdrun_registry, sdrun_registry_free>>;
using Devices = std::unique_ptr<sdrun_devices, Freed<sdrun_devices, sdrun_devices_free>>;
using Session = std::unique_ptr<sdrun_session, Freed<sdrun_session, sdrun_session_free>>;
using Arrays = std::unique_ptr<sdrun_arrays, Freed<sdrun_arrays, sdrun_arrays_free>>;

Registry open_registry() {
  sdrun_registry *registry;
  check(sdrun_registry_open(nullptr, &registry));
  return Registry(registry);
}

void list_devices(const sdrun_registry *registry) {
  sdrun_devices *found;
  check(sdrun_registry_devices(registry, nullptr, &found));
  const Devices devices(found);
  for (size_t i = 0; i < sdrun_devices_count(found); i++) {
    sdrun_device_info info{sizeof info};
    check(sdrun_devices_get(found, i, &info));
    std::cout << info.provider << ": " << (info.name ? info.name : "-") << (info.why_not ? ", not usable" : "") << "\n";
  }
}

std::vector<float> run(const sdrun_session *session, const std::vector<float> &values, const std::vector<size_t> &dims) {
  sdrun_tensor_info input{sizeof input};
  check(sdrun_session_input(session, 0, &input));
  const sdrun_array array{input.name, "f32", dims.data(), dims.size(), values.data(), values.size() * sizeof(float)};
  sdrun_arrays *out;
  check(sdrun_session_run(session, &array, 1, nullptr, &out));
  const Arrays outputs(out);
  sdrun_array output;
  check(sdrun_arrays_get(out, 0, &output));
  const auto *first = static_cast<const float *>(output.data);
  return std::vector<float>(first, first + output.bytes / sizeof(float));
}

}  // namespace

int main() try {
  const Registry registry = open_registry();
  list_devices(registry.get());

  const std::vector<size_t> dims{1, 4, 8, 8};
  const sdrun_shape shape{"latent_sample", dims.data(), dims.size()};
  sdrun_session_options options{sizeof options};
  options.model = "taesd/decoder";
  options.shapes = &shape;
  options.shape_count = 1;
  options.place.provider = "ggml";
  sdrun_session *opened;
  check(sdrun_session_open(registry.get(), &options, nullptr, &opened));
  const Session session(opened);

  std::vector<float> values(4 * 8 * 8);
  for (size_t i = 0; i < values.size(); i++) {
    values[i] = std::sin(static_cast<float>(i));
  }
  const std::vector<float> before = run(opened, values, dims);
  std::cout << sdrun_session_provider(opened) << " on " << sdrun_session_device(opened) << ": " << before.size()
            << " values, the first is " << before.at(0) << "\n";

  size_t changed;
  check(sdrun_session_refit(opened, nullptr, nullptr, 0, nullptr, &changed));
  if (run(opened, values, dims) != before) {
    throw std::runtime_error("the same weights give other values");
  }
  return 0;
} catch (const std::exception &error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
