#include <nanobind/nanobind.h>

NB_MODULE(_ffi, m) { m.def("registrations", []() { return nanobind::dict(); }); }
