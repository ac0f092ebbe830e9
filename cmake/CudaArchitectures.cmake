# pycomm_cuda_architectures(<version of nvcc> <variable>): Ampere, Hopper and, where nvcc knows it, Blackwell: machine code
# for these, and PTX of the last one for later devices.
function(pycomm_cuda_architectures version variable)
  if(version VERSION_LESS 12.1)
    message(FATAL_ERROR "pycomm's CUDA library needs nvcc 12.1 or later (30 KB of kernel arguments); this is ${version}")
  elseif(version VERSION_LESS 12.8)
    set(${variable} 80-real 90 PARENT_SCOPE)
  else()
    set(${variable} 80-real 90-real 100 PARENT_SCOPE)
  endif()
endfunction()
