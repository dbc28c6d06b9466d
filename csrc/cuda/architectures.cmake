# For which architectures the CUDA code is compiled. Those of the machine's cards; without a card, code for the ones
# that most servers have, with PTX that later ones can compile; and what a release has, which takes several times as
# long: a card of 89 runs the code of 86, and one of 103 or 121 that of 100 or 120. Without -real an architecture has
# its PTX too: a release has that of 100 for later ones, such as 110, as PTX takes as much room as code.
set(FUSEDCONV_USUAL_ARCHITECTURES 80 90a-real)
set(FUSEDCONV_RELEASE_ARCHITECTURES 75-real 80-real 86-real 90a-real 100 120-real)

# What the compiler has code for, as in "sm_90a".
function(list_compiler_architectures compiler result)
  execute_process(COMMAND ${compiler} --list-gpu-code OUTPUT_VARIABLE listed OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX REPLACE "[\r\n]+" ";" listed "${listed}")
  set(${result} "${listed}" PARENT_SCOPE)
endfunction()

# Those of the machine's cards; empty where there is none that the code and the compiler serve.
function(find_card_architectures compiler result)
  set(found)
  find_program(FUSEDCONV_NVIDIA_SMI nvidia-smi)
  if(FUSEDCONV_NVIDIA_SMI)
    execute_process(COMMAND ${FUSEDCONV_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
    list_compiler_architectures(${compiler} known)
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" architecture ${capability})
      if(architecture EQUAL 90)
        set(architecture 90a) # for wgmma
      endif()
      if(capability VERSION_GREATER_EQUAL 7.5 AND "sm_${architecture}" IN_LIST known)
        list(APPEND found ${architecture}-real)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# From what was asked for: a list, "release", or nothing.
function(choose_architectures asked compiler result)
  if(asked STREQUAL "release")
    set(chosen ${FUSEDCONV_RELEASE_ARCHITECTURES})
  elseif(asked)
    set(chosen ${asked})
  else()
    find_card_architectures(${compiler} chosen)
    if(NOT chosen)
      set(chosen ${FUSEDCONV_USUAL_ARCHITECTURES})
    endif()
  endif()
  foreach(architecture IN LISTS chosen)
    if(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 75)
      message(FATAL_ERROR "FUSEDCONV_CUDA_ARCHITECTURES has '${architecture}', which is no architecture from 75 on, "
        "such as 80, 90a or 86-real; it is a list of these, or release")
    endif()
  endforeach()
  message(STATUS "fusedconv: CUDA code for ${chosen}")
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()
