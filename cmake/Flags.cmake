# pycomm_flags: what every file of floors 0 to 3 and every C++ test is compiled with.
add_library(pycomm_flags INTERFACE)

target_compile_definitions(pycomm_flags INTERFACE _GNU_SOURCE)
if(PYCOMM_FAULT_POINTS)
  target_compile_definitions(pycomm_flags INTERFACE PYCOMM_FAULT_POINTS=1)
endif()

# A fused multiply-add rounds once where the scalar reference rounds twice, so ranks with different CPUs would
# disagree in the last bit. No -march here either: SIMD files choose their instructions by function, at run time.
target_compile_options(pycomm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-Wall;-Wextra>)
if(PYCOMM_WERROR)
  target_compile_options(pycomm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(PYCOMM_SANITIZE)
  # Without -fno-sanitize-recover UBSan only prints, and the test passes.
  set(sanitize -fsanitize=${PYCOMM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # -O1: what -O2 saves while the tests run, it costs several times while they are compiled.
  target_compile_options(pycomm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize};-O1>)
  target_link_options(pycomm_flags INTERFACE ${sanitize})
endif()
